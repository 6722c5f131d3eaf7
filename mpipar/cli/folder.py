"""Tries in a folder what checkpoints do there, on all ranks, and judges it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipar.cli.finding import GIB, Finding, count, of_ranks, some

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = Path(__file__).with_name("trial.py")
# A file system that has not answered by then is dead.
LIMIT_S = 20.0
_KILL_S = 1.0
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

    seconds   that a rank waits for the file system each time
    """
    made = _call(seconds, "make", out) if world.rank == 0 else None
    made = world.bcast(made)
    if "failed" in made:
        return world.allgather(Trial(host, str(out), **made))
    work = made["work"]
    folder = os.path.dirname(work)
    own = Trial(host, folder, **_call(seconds, "write", work, world.rank))
    wrote = world.allgather(not own.failed and not own.hidden)
    peer = (world.rank + 1) % world.size
    if wrote[world.rank] and wrote[peer]:
        own = replace(own, **_call(seconds, "read", work, peer))
    trials = world.allgather(own)
    if world.rank == 0:
        _call(seconds, "remove", work)
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
        hosts = some(dict.fromkeys(trials[rank].host for rank in failed))
        reason = trials[failed[0]].failed
        text = f"{where}: {reason} ({of_ranks(failed)} on {hosts})"
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


def _call(seconds: float, *words: object) -> dict[str, Any]:
    """What the trial's program tells; "failed" where it tells nothing in time."""
    # Without site-packages it starts in no time. It keeps none of the rank's files,
    # whose end a launcher may wait for.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(PROGRAM), *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
        return json.loads(text)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        process.stdout.close()
        reason = f"no answer in {seconds:g} s"
        return {"failed": f"the file system does not respond: {reason}"}
    except ValueError:
        return {"failed": f"the trial ended with status {process.returncode}"}
