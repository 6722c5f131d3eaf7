"""A contestant's processes: started, given turns, and ended whatever happens."""

import json
import os
import select
import signal
import subprocess
import time
from typing import Any

from mpipar.bench.contestants import Contestant, Match

# A contestant that says nothing for so long is given up.
PATIENCE_S = 900.0
# Threads of the one before may spin for a while after their step.
PAUSE_S = 0.3


class NoAnswerError(Exception):
    """A contestant cannot run, died or is silent; the message says why."""


class Rival:
    """A job that makes steps on demand.

    seconds  of each timed step, the slowest rank's
    losses   of all steps since the start, the mean over processes
    memory   bytes, summed over processes: peak while starting, peak of the steps, and
             the resident memory after the last step with shared pages divided
    """

    def __init__(self, contestant: Contestant, match: Match) -> None:
        self.contestant = contestant
        self.count = contestant.processes(len(match.cores))
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.facts: dict[str, Any] = {}
        self.memory: dict[str, int] = {}
        self._folder = match.folder / contestant.name
        self._folder.mkdir()
        self._orders = [self._pipe("orders", rank) for rank in range(self.count)]
        self._answers = [self._pipe("answers", rank) for rank in range(self.count)]
        self._rest = [b""] * self.count
        self._jobs: list[subprocess.Popen] = []

    def start(self, match: Match) -> None:
        """Start the processes; returns once their warm-up is over.

        Raises NoAnswerError.
        """
        with (self._folder / "log").open("w") as log:
            for command in match.commands(self.contestant, self._folder):
                try:
                    job = subprocess.Popen(
                        command,
                        env=match.environment(self.contestant),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                except OSError as error:
                    raise NoAnswerError(f"{command[0]}: {error.strerror}") from None
                self._jobs.append(job)
        answers = self._hear()
        self.facts = answers[0]["facts"]
        self.memory["start_peak"] = sum(a["memory"]["peak"] for a in answers)

    def turn(self) -> None:
        """One pair of steps. Raises NoAnswerError."""
        time.sleep(PAUSE_S)
        for pipe in self._orders:
            os.write(pipe, b"step\n")
        answers = self._hear()
        self.seconds.append(max(a["seconds"] for a in answers))
        self.memory["steps_peak"] = sum(a["memory"]["peak"] for a in answers)
        proportional = sum(a["memory"]["proportional"] for a in answers)
        self.memory["proportional"] = proportional

    def end(self) -> None:
        """Let the processes finish, and stop those that do not."""
        for pipe in self._orders:
            os.close(pipe)
        until = time.monotonic() + (10 if self.seconds else 0)
        for job in self._jobs:
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                _stop(job, number, max(0.0, until - time.monotonic()) + 0.5)
        for pipe in self._answers:
            os.close(pipe)

    def _hear(self) -> list[dict[str, Any]]:
        """The next answer of every process."""
        until = time.monotonic() + PATIENCE_S
        answers = [self._hear_rank(rank, until) for rank in range(self.count)]
        losses = [a["losses"] for a in answers]
        self.losses += [sum(each) / self.count for each in zip(*losses, strict=True)]
        return answers

    def _hear_rank(self, rank: int, until: float) -> dict[str, Any]:
        while b"\n" not in self._rest[rank]:
            if time.monotonic() > until:
                raise NoAnswerError(f"no answer in {PATIENCE_S:.0f} s")
            # Whichever rank fails, the others may wait for it for ever.
            alive = all(job.poll() is None for job in self._jobs)
            self._read(0.2 if alive else 0.0)
            if not alive and b"\n" not in self._rest[rank]:
                raise NoAnswerError(self._last_words())
        line, _, self._rest[rank] = self._rest[rank].partition(b"\n")
        answer = json.loads(line)
        if "failed" in answer:
            raise NoAnswerError(answer["failed"])
        return answer

    def _read(self, patience_s: float) -> None:
        """Take in what the processes have said."""
        ready, _, _ = select.select(self._answers, [], [], patience_s)
        for pipe in ready:
            said = os.read(pipe, 1 << 16)
            self._rest[self._answers.index(pipe)] += said
            if not said:
                # A closed pipe is always ready: the job ends in a moment.
                time.sleep(0.02)

    def _last_words(self) -> str:
        """The failure that some rank told of, or the end of the log."""
        for rest in self._rest:
            for line in rest.splitlines():
                if b'"failed"' in line:
                    return json.loads(line)["failed"]
        log = (self._folder / "log").read_text(errors="replace").splitlines()
        lines = [line.strip() for line in log if line.strip()]
        return lines[-1] if lines else "ended without a word"

    def _pipe(self, name: str, rank: int) -> int:
        """A named pipe, opened so that neither side waits for the other's opening."""
        path = self._folder / f"{name}.{rank}"
        os.mkfifo(path)
        if name == "orders":
            return os.open(path, os.O_RDWR)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _stop(job: subprocess.Popen, number: int | None, patience_s: float) -> None:
    """Wait for a job to end, after a signal to all of its processes."""
    if job.poll() is not None:
        return
    if number is not None:
        os.killpg(job.pid, number)
    try:
        job.wait(patience_s)
    except subprocess.TimeoutExpired:
        pass
