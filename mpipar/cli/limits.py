"""What the system grants a rank: memory, open files, locked memory, sizes of files."""

import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipar.cli.finding import GIB, Finding, by_node

_MEMINFO, _INFINIBAND = Path("/proc/meminfo"), Path("/sys/class/infiniband")
# Python, NumPy and the compiled kernels of a rank take a third of this.
_LEAST_MEMORY = GIB // 2
_LEAST_FILES = 1024
# A rank of MPI keeps up to a few connections to each other rank
_FILES_A_RANK = 4
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Limits:
    """Bytes, and number of open files; None = no limit.

    memory      available on the node, or that its control groups allow if that is less
    address     ulimit -v
    locked      ulimit -l
    files       ulimit -n
    file_bytes  ulimit -f
    infiniband  whether the node has such a network, which needs locked memory
    """

    memory: int | None
    address: int | None
    locked: int | None
    files: int | None
    file_bytes: int | None
    infiniband: bool


def collect_limits(cgroup_memory: int | None) -> Limits:
    """Look at this process."""
    known = [size for size in (_available(), cgroup_memory) if size is not None]
    return Limits(
        memory=min(known, default=None),
        address=_soft(resource.RLIMIT_AS),
        locked=_soft(resource.RLIMIT_MEMLOCK),
        files=_soft(resource.RLIMIT_NOFILE),
        file_bytes=_soft(resource.RLIMIT_FSIZE),
        infiniband=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    )


def judge_memory(limits: Sequence[tuple[str, Limits]]) -> Finding:
    """Judge the memory of each rank, given with its node."""
    ranks = Counter(host for host, _ in limits)
    shares = {
        host: found.memory / ranks[host]
        for host, found in limits
        if found.memory is not None
    }
    if not shares:
        return Finding("memory", "ok", "not known here")
    host = min(shares, key=lambda name: shares[name])
    share = shares[host]
    text = f"{share / GIB:.1f} GiB free a rank"
    text += f" on {host}, the least" if len(ranks) > 1 else ""
    if share < _LEAST_MEMORY:
        advice = "Start fewer ranks a node, or ask the batch system or the container "
        advice += "for more memory (sbatch --mem, docker run --memory)."
        return Finding("memory", "warn", text, advice)
    return Finding("memory", "ok", text)


def judge_limits(limits: Sequence[tuple[str, Limits]]) -> Finding:
    """Judge what shells and batch systems have limited, rank by rank."""
    faults = dict.fromkeys(
        fault for _, found in limits for fault in _faults(found, len(limits))
    )
    text = by_node((host, _describe(found)) for host, found in limits)
    if not faults:
        return Finding("limits", "ok", text)
    advice = f"Raise {', '.join(faults)} before the launcher starts."
    return Finding("limits", "warn", text, advice)


def _faults(found: Limits, ranks: int) -> list[str]:
    """What to set, as a shell wants it."""
    least = max(_LEAST_FILES, _FILES_A_RANK * ranks)
    faults = []
    if found.files is not None and found.files < least:
        faults.append(f"open files (ulimit -n {least})")
    if found.address is not None:
        faults.append("address space (ulimit -v unlimited)")
    if found.file_bytes is not None:
        faults.append("sizes of files (ulimit -f unlimited)")
    if found.infiniband and found.locked is not None:
        faults.append("locked memory, which InfiniBand needs (ulimit -l unlimited)")
    return faults


def _describe(found: Limits) -> str:
    parts = [f"{found.files or 'any number of'} open files"]
    for name, size in (
        ("address space", found.address),
        ("locked memory", found.locked),
        ("size of a file", found.file_bytes),
    ):
        text = "unlimited" if size is None else f"{size / 1e6:,.0f} MB"
        parts.append(f"{name} {text}")
    return ", ".join(parts)


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == _UNLIMITED else soft


def _available() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(words[1]) * 1024 for words in found), None)
