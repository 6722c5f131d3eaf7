"""A program that does in a folder what checkpoints do there, and tells it as JSON.

python trial.py make DIR         a new folder in DIR or the first above it that is there
python trial.py write WORK RANK  a file of this rank, on disk before it gets its name
python trial.py read WORK RANK   whether the file of that rank is there and whole
python trial.py remove WORK

It is a process of its own, without MPI, since one that waits for a dead file system may
be one that nothing can end: the rank goes on and leaves it behind.
"""

import fcntl
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

# A name that one node has made may reach another so much later.
_LATE_S = 10.0
_BYTES = 1 << 16


def make(out: str) -> Mapping[str, Any]:
    """Its path in "work"."""
    folder = os.path.abspath(out)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    work = os.path.join(folder, f".mpipar-doctor-{secrets.token_hex(6)}")
    os.mkdir(work, 0o700)
    return {"work": work}


def write(work: str, rank: str) -> Mapping[str, Any]:
    """Fields of a `Trial`."""
    if not _comes(work):
        return {"hidden": True}
    name = _file(work, rank)
    file = os.open(f"{name}.tmp", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock = _try_lock(file)
        os.truncate(file, _BYTES)
        os.pwrite(file, bytes(_BYTES), 0)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(f"{name}.tmp", name)
    names = os.open(work, os.O_RDONLY)
    try:
        os.fsync(names)
    finally:
        os.close(names)
    found = os.statvfs(work)
    return {
        "lock": lock,
        "kind": _kind(work),
        "free": found.f_bavail * found.f_frsize,
        # Some file systems make inodes as they need them, and tell of none
        "free_files": found.f_favail if found.f_files else None,
    }


def read(work: str, rank: str) -> Mapping[str, Any]:
    """Fields of a `Trial`."""
    name = _file(work, rank)
    if not _comes(name):
        return {"hidden": True}
    with open(name, "rb") as file:
        return {"hidden": file.read() != bytes(_BYTES)}


def remove(work: str) -> Mapping[str, Any]:
    """Nothing stays."""
    shutil.rmtree(work, ignore_errors=True)
    return {}


def _file(work: str, rank: str) -> str:
    return os.path.join(work, f"rank_{rank}")


def _comes(path: str) -> bool:
    """True once it is there."""
    until = time.monotonic() + _LATE_S
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _try_lock(file: int) -> str:
    """Lock as HDF5 does; why it cannot be done."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _kind(path: str) -> str:
    """The type of the file system that a path lies on."""
    try:
        with open("/proc/mounts") as file:
            mounts = {fields[1]: fields[2] for fields in map(str.split, file)}
    except OSError:
        return ""
    while path not in mounts and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return mounts.get(path, "")


def main(action: str, *words: str) -> None:
    """Print what was found, or "failed" with the reason."""
    actions = {"make": make, "write": write, "read": read, "remove": remove}
    try:
        found = actions[action](*words)
    except OSError as problem:
        where = f": {problem.filename}" if problem.filename else ""
        found = {"failed": f"{problem.strerror or problem}{where}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
