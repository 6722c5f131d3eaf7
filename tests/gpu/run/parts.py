"""The parts of the run, by worth, and how each is started and ended."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.run.record import append, read

# After SIGTERM; jobs that a part has started are ended by it.
GRACE_S = 12.0
LOG_LINES = 12


@dataclass(frozen=True)
class Part:
    """One part.

    name, module  of its records and of its checks (gpu/run/MODULE.py)
    group    check, parity or bench, which --only names
    seconds  it may take at most, of a whole run of eight minutes
    ranks    under mpiexec; 0 = it is one process without MPI
    """

    name: str
    module: str
    group: str
    seconds: float
    ranks: int = 0


PARTS = (
    Part("machine", "facts", "check", 45),
    Part("ops", "ops", "check", 90),
    Part("products", "products", "check", 50),
    Part("attention", "attention", "check", 40),
    Part("parity on 1 rank", "layouts", "parity", 40, 1),
    Part("speed of gpt2-124m", "speed", "bench", 130),
    Part("parity on 2 ranks", "layouts", "parity", 60, 2),
    Part("time of a step", "profile", "bench", 40),
    Part("kernels", "kernels", "bench", 45),
    Part("training", "training", "parity", 60),
    Part("speed of llama-8b", "speed", "bench", 110),
    Part("parity on 4 ranks", "layouts", "parity", 60, 4),
    Part("speed of gpt2-1.5b", "speed", "bench", 130),
)
GROUPS = tuple(dict.fromkeys(part.group for part in PARTS))


@dataclass(frozen=True)
class Files:
    """Where parts write: records as lines of JSON, a folder that goes, one log."""

    records: Path
    scratch: Path
    log: Path


def run_part(
    part: Part, files: Files, env: Mapping[str, str], *, seconds: float, dry: bool
) -> dict[str, Any]:
    """Run a part until it ends or its time does; how it went.

    A check that ends the process is recorded as failed, and the checks behind it run in
    another one.
    """
    began, until = time.monotonic(), time.monotonic() + seconds
    starts, status = 0, 1
    while status not in (None, 0):
        before, starts = _begun(part, files), starts + 1
        status = _start(part, files, env, until - time.monotonic(), dry)
        reason = "ran out of time" if status is None else f"ended with {status}"
        _close(part, files, reason)
        if _begun(part, files) == before:
            break
    if status not in (None, 0):
        error = f"the part {reason}: {_tail(files.log)}"
        line = {"part": part.name, "kind": "check", "name": "the part ends"}
        append(files.records, line | {"passed": False, "error": error})
    took = time.monotonic() - began
    late = status is None
    return {"name": part.name, "seconds": took, "late": late, "starts": starts}


def _start(
    part: Part, files: Files, env: Mapping[str, str], seconds: float, dry: bool
) -> int | None:
    """Exit status of one process of the part; None where it ran out of time."""
    words = [part.name, part.module, f"--records={files.records}"]
    # A part that looks at the clock ends by itself, before it is ended.
    words += [f"--scratch={files.scratch}", f"--seconds={max(1.0, seconds - 5)}"]
    words += ["--dry-run"] * dry
    command = [sys.executable, "-m", "gpu.run.part", *words]
    if part.ranks:
        command = [*mpiexec(), "-n", str(part.ranks), *command, "--mpi"]
    with files.log.open("a", encoding="utf-8") as log:
        print(f"\n=== {part.name}", file=log, flush=True)
        try:
            job = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=log)
            return 127
        try:
            return job.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(job)


def _end(job: subprocess.Popen) -> None:
    """End what is left of a job, gently first."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        if job.poll() is None:
            try:
                os.killpg(job.pid, number)
                job.wait(patience_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def _begun(part: Part, files: Files) -> int:
    """How many checks of a part were begun."""
    lines = read(files.records)
    return sum(x["part"] == part.name and x["kind"] == "begin" for x in lines)


def _close(part: Part, files: Files, reason: str) -> None:
    """Record checks as failed that were begun and not ended."""
    lines = [x for x in read(files.records) if x["part"] == part.name]
    ended = {x["name"] for x in lines if x["kind"] == "check"}
    begun = [x["name"] for x in lines if x["kind"] == "begin"]
    for name in (name for name in begun if name not in ended):
        error = f"the process {reason}: {_tail(files.log)}"
        line = {"part": part.name, "kind": "check", "name": name, "passed": False}
        append(files.records, line | {"error": error})


def _tail(log: Path) -> str:
    """The last words of a log, in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    words = [line.strip() for line in lines[-LOG_LINES:] if line.strip()]
    return " | ".join(words)[-600:]


def mpiexec() -> list[str]:
    """The launcher beside this Python, or else the first on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return [found or "mpiexec"]
