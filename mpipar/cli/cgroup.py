"""What a container or a batch system allows this process: memory, cores, their time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Version 1 writes a number near 2⁶³ where there is no limit
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Cgroup:
    """Limits of the control groups around a process; None where there is none.

    memory   bytes for all processes of the group
    quota    processors' worth of time that they get
    cores    that they may be bound to
    """

    memory: int | None
    quota: float | None
    cores: frozenset[int] | None


def read_cgroup(proc: Path = _PROC, mount: Path = _MOUNT) -> Cgroup:
    """Read the limits, of version 1 or 2; the narrowest of all groups around."""
    memory = [
        int(text)
        for file in ("memory.max", "memory/memory.limit_in_bytes")
        for text in _texts(proc, mount, file)
        if text.isdecimal() and int(text) < _NO_LIMIT
    ]
    quotas = [
        int(quota) / int(period)
        for quota, period in _quotas(proc, mount)
        if quota.isdecimal() and int(period)
    ]
    files = ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus")
    cores = [parse_cores(text) for file in files for text in _texts(proc, mount, file)]
    return Cgroup(
        min(memory, default=None),
        min(quotas, default=None),
        min(filter(None, cores), key=len, default=None),
    )


def parse_cores(text: str) -> frozenset[int]:
    """The cores of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _quotas(proc: Path, mount: Path) -> Iterator[tuple[str, str]]:
    for text in _texts(proc, mount, "cpu.max"):
        quota, _, period = text.partition(" ")
        yield quota, period
    names = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    yield from zip(*(_texts(proc, mount, name) for name in names), strict=False)


def _texts(proc: Path, mount: Path, file: str) -> Iterator[str]:
    """Contents of a file of the own group and of all those around it.

    file   of version 2; of version 1 with its controller's folder before it
    """
    controller, _, name = file.rpartition("/")
    own = _own_group(proc, controller)
    # Inside a container the own group may lie where its name cannot be seen
    for group in (own, *own.parents):
        try:
            yield (mount / controller / group / name).read_text().strip()
        except OSError:
            continue


def _own_group(proc: Path, controller: str) -> Path:
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return Path()
    for line in lines:
        _, names, group = line.split(":", 2)
        if controller in names.split(","):
            return Path(group.lstrip("/"))
    return Path()
