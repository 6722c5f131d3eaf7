"""Starts a training job again when it fails, as long as it gets any further.

Nothing here loads MPI: this process is no part of the job's world.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from mpipar.errors import ConfigError

# Exit statuses after which a job is not started again: done, a wrong recipe, stopped by
# a signal after a save
_FINAL = (0, 2, 3)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def supervise(
    command: Sequence[str],
    *,
    restarts: int,
    without_progress: int,
    say: Callable[[str], None],
) -> int:
    """Runs a job to its end; its exit status, the last one where it was given up.

    Every start goes on from the newest checkpoint: "--resume auto" is added where the
    command says nothing of it. Signals go to the job, which is not started again then.

    command            a launcher and its `mpipar train ... --out DIR ...`
    restarts           how often it is started again at most
    without_progress   failures in a row without a new checkpoint, after which it is
                       given up
    Raises             ConfigError where the command is none that can go on
    """
    out = _out_of(command)
    if not any(word.partition("=")[0] == "--resume" for word in command):
        command = [*command, "--resume", "auto"]
    fruitless, before = 0, _latest(out)
    with _Child() as child:
        for again in range(restarts + 1):
            began = time.monotonic()
            status = child.run(command)
            if status in _FINAL or child.was_signalled:
                return status
            after = _latest(out)
            fruitless = 0 if after != before else fruitless + 1
            before = after
            seconds = time.monotonic() - began
            say(
                f"the job ended with status {status} after {seconds:.0f} s; newest "
                f"checkpoint: {after or 'none'}"
            )
            if fruitless >= without_progress:
                say(f"given up: {fruitless} failures in a row without a new checkpoint")
                return status
            if again < restarts:
                say(f"starts it again ({again + 1} of {restarts})")
        say(f"given up after {restarts} restarts")
        return status


def _out_of(command: Sequence[str]) -> Path:
    """The run folder that a command names."""
    wrong = []
    if "train" not in command:
        wrong.append("the command after -- must contain: mpipar train RECIPE --out DIR")
    for place, word in enumerate(command):
        if word == "--out" and place + 1 < len(command):
            out = command[place + 1]
            break
        if word.startswith("--out="):
            out = word.partition("=")[2]
            break
    else:
        wrong.append(
            "the command after -- must name the run's folder with --out DIR: that is "
            "where it goes on from"
        )
    if wrong:
        raise ConfigError(wrong, title="the command")
    return Path(out)


def _latest(out: Path) -> str:
    """Name of the newest checkpoint of a run; "" where there is none."""
    try:
        return (out / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class _Child:
    """The job that runs, and the signals that it is sent on."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._process: subprocess.Popen | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "_Child":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def was_signalled(self) -> bool:
        """True once a signal has come."""
        return self._signal is not None

    def run(self, command: Sequence[str]) -> int:
        """Runs a command to its end; its status, 128 + n where signal n ended it."""
        try:
            # A terminal's Ctrl-C reaches this process alone, which passes it on once.
            self._process = subprocess.Popen(command, start_new_session=True)
        except OSError as problem:
            reason = f"cannot start {command[0]}: {problem}"
            raise ConfigError([reason], title="the command") from None
        if self._signal is not None:
            # It came when there was nobody to pass it on to.
            self._process.send_signal(self._signal)
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
