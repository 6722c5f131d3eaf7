"""Runs mpipar under a launcher as its users do, and looks at it while it runs."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher import Job, environment, members, mpiexec, run_job

BESIDE = Path(sys.executable).parent
SCRIPT = [str(BESIDE / "mpipar")]
MODULE = [sys.executable, "-m", "mpipar"]
_LAUNCHER = Path(shutil.which(mpiexec()[0]) or mpiexec()[0])
IS_OPENMPI = _LAUNCHER.with_name("prterun").exists()
INJECT = str(Path(__file__).with_name("inject"))
# Lets the shell live on when a launcher signals it, and writes down how mpipar ended.
_NOTE_STATUS = """trap : INT TERM; "$@"; status=$?
echo $status >"$MPIPAR_TEST_JOB/status.${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}"
exit $status"""


RECIPE = """
[model]
family = "gpt"
layers = 1
width = 16
heads = 2
context = 16
[data]
source = "corpus.txt"
[train]
steps = 6
global_batch = 4
precision = "fp64"
[log]
every = 1
progress = "lines"
"""


@dataclass
class Run:
    """A job under way. `until` is when it is ended by force."""

    folder: Path
    until: float
    job: Future[Job]

    @property
    def output(self) -> str:
        """What the job has written so far."""
        file = self.folder / "output"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, text: str, timeout: float = 40) -> None:
        """Return once the job has written `text`."""
        until = time.monotonic() + timeout
        while text not in self.output:
            ended = self.job.done()
            assert not ended and time.monotonic() < until, f"no {text!r}: {self.output}"
            time.sleep(0.01)

    def ranks(self) -> dict[int, int]:
        """Process of each rank that is alive; not its shell, not its workers."""
        found = {}
        for pid, words in self._processes().items():
            number = _environ(pid).get("PMI_RANK") or _environ(pid).get(
                "OMPI_COMM_WORLD_RANK"
            )
            if number and words[1:2] != ["-c"]:
                found[int(number)] = pid
        return found

    def workers(self) -> list[int]:
        """Processes that prepare batches for a rank."""
        return [
            pid
            for pid, words in self._processes().items()
            if any("spawn_main" in word for word in words)
        ]

    def launcher(self) -> int:
        """Process of mpiexec."""
        return next(pid for pid in members(self.folder) if _parent(pid) == os.getpid())

    @staticmethod
    def kill(pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of the job."""
        os.kill(pid, number)

    def end(self, timeout: float = 40) -> Job:
        """How the job ended; it gets so many more seconds."""
        self.until = time.monotonic() + timeout
        return self.job.result()

    def all_ended_with(self, status: int, n: int) -> bool:
        """True if that was the exit status of all n ranks; `note` must be set.

        Open MPI ends the ranks that are on their way out when the first has left.
        """
        files = self.folder.glob("status.*")
        found = {int(file.suffix[1:]): int(file.read_text()) for file in files}
        if IS_OPENMPI:
            return status in found.values() and set(found.values()) <= {status, 143}
        return found == dict.fromkeys(range(n), status)

    def wait_for_fault(self, timeout: float = 40) -> None:
        """Return once a planted fault has happened."""
        until = time.monotonic() + timeout
        while not (self.folder / "fault").exists():
            assert time.monotonic() < until, self.output
            time.sleep(0.01)

    def since_fault(self) -> float:
        """Seconds since the first planted fault."""
        return time.time() - float((self.folder / "fault").read_text().split()[0])

    def _processes(self) -> dict[int, list[str]]:
        return {pid: _words(pid) for pid in members(self.folder)}


@contextmanager
def start(
    n: int,
    *words: object,
    program: Sequence[str] = tuple(SCRIPT),
    launcher: Sequence[str] | None = None,
    timeout: float = 60,
    note: bool = False,
    cwd: Path | None = None,
    **env: str | None,
) -> Iterator[Run]:
    """Start `mpipar words` on n ranks; whatever is left of it is ended afterwards.

    n         0 starts it without a launcher
    program   what is called mpipar here
    launcher  another one than this environment's mpiexec
    note      run every rank in a shell that notes its exit status
    env       variables to change; None removes one
    """
    command = [*(launcher or mpiexec()), "-n", str(n)] if n else []
    if note:
        command += ["sh", "-c", _NOTE_STATUS, "sh"]
    command += [*program, *map(str, words)]
    env = {"PYTHONPATH": INJECT, "OMP_NUM_THREADS": "1", **env}
    with tempfile.TemporaryDirectory(prefix="mpipar-run-") as name:
        folder = Path(name)
        environ = environment(folder, **env)
        run = Run(folder, time.monotonic() + timeout, Future())

        def is_late() -> bool:
            return time.monotonic() > run.until

        with ThreadPoolExecutor(1) as pool:
            run.job = pool.submit(run_job, command, folder, environ, is_late, cwd)
            try:
                yield run
            finally:
                run.until = 0


def write_recipe(folder: Path) -> Path:
    """A recipe whose steps take milliseconds, and its corpus."""
    words = (f"{i} squared is {i * i}; " for i in range(600))
    (folder / "corpus.txt").write_text("".join(words))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def mpipar(n: int, *words: object, **options: object) -> Job:
    """Run `mpipar words` on n ranks to its end; options as in start."""
    with start(n, *words, **options) as run:
        return run.job.result()


def train(n: int, *words: object, status: int = 0, **options: object) -> Job:
    """Run `mpipar train words` to its end, which must have this exit status."""
    job = mpipar(n, "train", *words, **options)
    assert (job.status, job.late, job.left) == (status, False, []), job.output
    return job


# What a step was: the rest of its line in metrics.jsonl is measured
_EXACT = ("step", "loss", "grad_norm", "lr", "updated", "loss_scale", "tokens")


def steps_of(run: Path) -> list[tuple]:
    """What a run folder says of its steps, in the order of its lines; a line that is
    cut off is none."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    return [tuple(line[key] for key in _EXACT) for line in lines]


def _words(pid: int) -> list[str]:
    return _read(pid, "cmdline").decode(errors="replace").split("\0")[:-1]


def _environ(pid: int) -> dict[str, str]:
    text = _read(pid, "environ").decode(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _parent(pid: int) -> int:
    stat = _read(pid, "stat")
    return int(stat.rpartition(b")")[2].split()[1]) if stat else 0


def _read(pid: int, what: str) -> bytes:
    try:
        return Path("/proc", str(pid), what).read_bytes()
    except OSError:
        return b""
