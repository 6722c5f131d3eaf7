"""What both commands write down: the machine, and a JSON file."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.comm import raise_together
from mpipar.errors import ConfigError


def machine() -> dict[str, Any]:
    """CPU model, numbers of the cores that may be used, kernel and versions."""
    return {
        "cpu": _proc("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def available_bytes() -> int:
    """Memory that could be had without swapping; a large number where unknown."""
    kib = _proc("/proc/meminfo", "MemAvailable").split()
    return int(kib[0]) * 1024 if kib else 1 << 62


def write_json(path: Path | None, facts: dict[str, Any]) -> None:
    """Writes the facts where a path is given. Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        reason = f"cannot write --json {path}: {problem}"
        raise ConfigError([reason], "the command") from None


def write_together(path: Path | None, facts: dict[str, Any] | None, world: Any) -> None:
    """Writes the facts of rank 0 where a path is given. Collective.

    facts    none on other ranks
    Raises   ConfigError on all ranks together
    """
    error = None
    if facts is not None:
        try:
            write_json(path, facts)
        except ConfigError as problem:
            error = problem
    raise_together(error, world)


def _proc(file: str, key: str) -> str:
    """The value of the first line "key : value" of a file of /proc, or nothing."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines if line.startswith(key))
    return next((value.strip() for _, _, value in found), "")
