"""What both commands write down: the machine, and a JSON file."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

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


def check_writable(path: Path | None) -> None:
    """Raises ConfigError before a long measurement rather than after it."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError([f"cannot write --json {path}"], "the command")


def write_json(path: Path | None, facts: dict[str, Any]) -> None:
    """Writes the facts where a path is given. Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        reason = f"cannot write --json {path}: {problem}"
        raise ConfigError([reason], "the command") from None


def _proc(file: str, key: str) -> str:
    """The value of the first line "key : value" of a file of /proc, or nothing."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines if line.startswith(key))
    return next((value.strip() for _, _, value in found), "")
