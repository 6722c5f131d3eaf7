"""Starts MPI jobs for tests, and ends every process of them.

MPIPAR_MPIEXEC replaces the launch command, such as "mpiexec --oversubscribe".
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Carries a path that only one job has; its processes are known by it.
TAG = "MPIPAR_TEST_JOB"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def mpiexec() -> list[str]:
    """The launcher of this Python's environment, or what MPIPAR_MPIEXEC says."""
    if os.environ.get("MPIPAR_MPIEXEC"):
        return shlex.split(os.environ["MPIPAR_MPIEXEC"])
    beside = Path(sys.executable).with_name("mpiexec")
    return [str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"]


def environment(folder: Path, **changes: str | None) -> dict[str, str]:
    """This process's environment for a job whose files go to folder.

    None removes a variable. Open MPI is told that root and more ranks than cores are
    meant; its variables mean nothing to the other libraries.
    """
    env = {**os.environ, TAG: str(folder), "TMPDIR": str(folder)}
    env.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    if os.getuid() == 0:
        env |= dict.fromkeys(ROOT, "1")
    env |= {name: value for name, value in changes.items() if value is not None}
    return {
        name: value for name, value in env.items() if changes.get(name, "") is not None
    }


@dataclass
class Job:
    """A command that has ended, or ran out of time.

    output  stdout and stderr as they came
    late    True when it was stopped for running out of time
    left    processes that outlived the command by more than a second; ended as well
    """

    status: int
    output: str
    seconds: float
    late: bool
    left: list[int]


def run_job(
    command: list[str],
    folder: Path,
    env: dict[str, str],
    is_late: Callable[[], bool],
    cwd: Path | None = None,
) -> Job:
    """Run a command until it ends or is_late() says so; leave no process behind.

    env must come from environment(folder): it carries the job's tag.
    """
    began = time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    late, segments, look = False, set(), 0.0
    try:
        while process.poll() is None and not late:
            time.sleep(0.02)
            late = is_late()
            if time.monotonic() > look:
                segments |= _segments(folder)
                look = time.monotonic() + 0.1
        seconds = time.monotonic() - began
        left = [] if late else _outliving(folder)
    finally:
        _end(process, folder)
        # An aborted job leaves its shared memory, a MiB per rank.
        for file in segments:
            file.unlink(missing_ok=True)
    text = (folder / "output").read_text(errors="replace")
    return Job(process.returncode, text, seconds, late, left)


def members(folder: Path) -> list[int]:
    """Processes that belong to the job of this folder, wherever they were moved."""
    mark = f"{TAG}={folder}\0".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def signal_all(pids: list[int], number: int) -> None:
    """Signal processes, some of which may have ended already."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _segments(folder: Path) -> set[Path]:
    """Named shared memory that the job's processes have mapped."""
    found = set()
    for pid in members(folder):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                found.add(Path("/dev/shm", line.rpartition("/")[2]))
    return found


def _outliving(folder: Path) -> list[int]:
    until = time.monotonic() + 1
    while (left := members(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _end(process: subprocess.Popen, folder: Path) -> None:
    # Let the launcher tidy up first: Open MPI keeps files while it runs.
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            pass
    until = time.monotonic() + 10
    while (left := members(folder)) and time.monotonic() < until:
        signal_all(left, signal.SIGKILL)
        time.sleep(0.02)
    process.wait(10)
