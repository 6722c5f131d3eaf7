"""The file of --json: whether it can be written is told before the work, not after."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipar.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI


def check_json(args: argparse.Namespace, world: MPI.Comm | None = None) -> None:
    """Raises ConfigError, on all ranks together, where --json cannot be written.

    world   whose rank 0 is to write it; none for a command that is alone
    """
    path = getattr(args, "json", None)
    if path is None:
        return
    reason = _obstacle(path) if world is None or world.rank == 0 else None
    if world is not None:
        reason = world.bcast(reason)
    if reason is not None:
        error = _error(path, reason)
        error.agreed = True
        raise error


def write_json(path: Path | None, data: Any) -> None:
    """Writes the data where a path is given. Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise _error(path, problem) from None


def _error(path: Path, reason: object) -> ConfigError:
    return ConfigError([f"cannot write --json {path}: {reason}"], "the command")


def _obstacle(path: Path) -> str | None:
    folder = path.absolute().parent
    try:
        if path.is_dir():
            return "it is a folder"
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if not os.access(path if path.exists() else folder, os.W_OK):
            return "permission denied"
    except OSError as problem:
        return problem.strerror
    return None
