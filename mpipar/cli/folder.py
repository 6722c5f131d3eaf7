"""Tries in a folder what checkpoints do there, on all ranks, and judges it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mpipar.cli.finding import GIB, Finding, count, of_ranks, some
from mpipar.cli.patience import within

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# A file system that has not answered by then is dead.
LIMIT_S = 30.0
# A name that one node has made may reach another so much later.
_LATE_S = 10.0
_MOUNTS = Path("/proc/mounts")
_BYTES = 1 << 16
_LEAST_FILES = 1000
# Weights and two moments in fp32
_BYTES_A_WEIGHT = 12
# Values of HDF5_USE_FILE_LOCKING with which HDF5 asks for no lock
_WITHOUT_LOCKS = ("FALSE", "0")


@dataclass(frozen=True)
class Trial:
    """What one rank could do in the folder.

    kind     of the file system
    free     bytes, and files that can still be made; None where it was not told
    failed   what failed and why, "" where all went well
    hidden   the folder, or a file that another rank has made in it, is not there
    lock     why files cannot be locked, "" if they can
    """

    host: str
    folder: str
    kind: str = ""
    free: int | None = None
    free_files: int | None = None
    failed: str = ""
    hidden: bool = False
    lock: str = ""


def try_folder(
    world: MPI.Comm, host: str, out: Path, seconds: float = LIMIT_S
) -> list[Trial]:
    """Make, write, flush, lock, rename and read files, and remove them; of all ranks.

    A folder that is not there yet stands for the first above it that is. Collective.

    seconds   that a rank may be inside the file system each time
    """
    made = None
    if world.rank == 0:
        made = _limited(lambda: _make(out), seconds)
    made = world.bcast(made)
    if isinstance(made, str):
        return world.allgather(Trial(host, str(out), failed=made))
    work = Path(made[0])

    def write() -> Trial:
        return _write(work, host, world.rank)

    own = _limited(write, seconds)
    if isinstance(own, str):
        own = Trial(host, str(work.parent), failed=own)
    wrote = world.allgather(not own.failed and not own.hidden)
    peer = (world.rank + 1) % world.size
    if wrote[world.rank] and wrote[peer]:
        seen = _limited(lambda: [_wait_for(work / _name(peer))], seconds)
        if isinstance(seen, str):
            own = replace(own, failed=seen)
        else:
            own = replace(own, hidden=not seen[0])
    trials = world.allgather(own)
    if world.rank == 0:
        _limited(lambda: [shutil.rmtree(work, ignore_errors=True)], seconds)
    return trials


def judge_folder(trials: Sequence[Trial], locking: str) -> list[Finding]:
    """Judge what all ranks could do, in rank order.

    locking   HDF5_USE_FILE_LOCKING
    """
    first = trials[0]
    where = f"{first.folder} ({first.kind})" if first.kind else first.folder
    details = [vars(trial) for trial in trials]
    findings = [_judge_use(trials, where, locking, details)]
    if not first.failed:
        findings.append(_judge_room(trials, where))
    return findings


def _judge_use(
    trials: Sequence[Trial], where: str, locking: str, details: Sequence[dict]
) -> Finding:
    failed = [rank for rank, trial in enumerate(trials) if trial.failed]
    if failed:
        trial = trials[failed[0]]
        text = f"{where}: {trial.failed} ({of_ranks(failed)}, {trial.host})"
        advice = "Checkpoints could not be saved. Choose a folder by --out DIR, here "
        advice += "and for mpipar train."
        return Finding("folder", "bad", text, advice, details)
    hidden = [rank for rank, trial in enumerate(trials) if trial.hidden]
    if hidden:
        hosts = some(dict.fromkeys(trials[rank].host for rank in hidden))
        text = f"{where}: {of_ranks(hidden)} on {hosts} cannot see what others write"
        advice = "A run folder must lie on a disk that all nodes share: --out DIR."
        return Finding("folder", "bad", text, advice, details)
    locks = [trial.lock for trial in trials if trial.lock]
    if locks and locking.upper() not in _WITHOUT_LOCKS:
        text = f"{where} has no file locks: {locks[0]}"
        advice = "mpipar takes none. For other programs that read its files with HDF5: "
        advice += "export HDF5_USE_FILE_LOCKING=FALSE."
        return Finding("folder", "warn", text, advice, details)
    done = "write, flush and rename" if locks else "write, flush, lock and rename"
    return Finding("folder", "ok", f"files {done} in {where}", details=details)


def _judge_room(trials: Sequence[Trial], where: str) -> Finding:
    free = min(trial.free for trial in trials if trial.free is not None)
    weights = free / _BYTES_A_WEIGHT / 1e9
    text = f"{free / GIB:.1f} GiB free, for a checkpoint of {weights:.3g} · 10⁹ weights"
    files = [trial.free_files for trial in trials if trial.free_files is not None]
    if min(files, default=_LEAST_FILES) < _LEAST_FILES:
        text = f"room for {count(min(files), 'file')} more in {where}"
        return Finding("disk", "bad", text, "Remove files: there are no inodes left.")
    if free < GIB:
        advice = "Checkpoints need room here, for one more than checkpoint.keep."
        return Finding("disk", "warn", text, advice)
    return Finding("disk", "ok", text)


def _limited(action: Callable[[], T], seconds: float) -> T | str:
    """What the action returns, which is no text; or in words what went wrong."""
    try:
        return within(seconds, action)
    except TimeoutError as late:
        return f"the file system does not respond: {late}"
    except OSError as problem:
        return f"{problem.strerror or problem}: {problem.filename or ''}".rstrip(": ")


def _make(out: Path) -> list[str]:
    """Path of a new folder that no one else uses."""
    parents = (out.absolute(), *out.absolute().parents)
    parent = next(path for path in parents if path.is_dir())
    return [tempfile.mkdtemp(prefix=".mpipar-doctor-", dir=parent)]


def _write(work: Path, host: str, rank: int) -> Trial:
    """Do what a rank does to save: a file that is on disk before it gets its name."""
    parent = str(work.parent)
    if not _wait_for(work):
        return Trial(host, parent, hidden=True)
    draft = work / f"{_name(rank)}.tmp"
    with draft.open("w+b", buffering=0) as file:
        lock = _try_lock(file.fileno())
        file.truncate(_BYTES)
        os.pwrite(file.fileno(), bytes(_BYTES), 0)
        os.fsync(file.fileno())
    draft.replace(work / _name(rank))
    _flush_names(work)
    found = os.statvfs(work)
    # Some file systems make inodes as they need them, and tell of none
    files = found.f_favail if found.f_files else None
    free = found.f_bavail * found.f_frsize
    return Trial(host, parent, _kind(work), free, files, lock=lock)


def _flush_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(file: int) -> str:
    """Lock as HDF5 does; why it cannot be done."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _wait_for(path: Path) -> bool:
    """True once there is something; a new name may reach another node late."""
    until = time.monotonic() + _LATE_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return path.is_dir() or path.read_bytes() == bytes(_BYTES)


def _name(rank: int) -> str:
    return f"rank_{rank:05d}"


def _kind(path: Path) -> str:
    """The type of the file system that a path lies on."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    mounts = {fields[1]: fields[2] for fields in map(str.split, lines)}
    return next((mounts[str(p)] for p in path.parents if str(p) in mounts), "")
