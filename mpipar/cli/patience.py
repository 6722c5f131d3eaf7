"""Time limits for what may never come back: a dead file system, a silent network."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mpipar.cli.launch import FAILED, LAST_WORDS_S

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# So many times longer do ranks wait that expect others to speak.
_LISTENERS = 1.5


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function returns, or raise what it raises.

    It runs in a thread of its own, which is left behind where it takes longer.

    Raises   TimeoutError after so many seconds
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]


class Patience:
    """Ends the job, with a word, where a stage of it takes too long; a context.

    seconds   that a stage may take
    """

    def __init__(self, world: MPI.Comm, host: str, seconds: float) -> None:
        self._who = f"[rank {world.rank} of {world.size}, {host}] "
        self._world, self._seconds = world, seconds
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Patience:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, stage: str, advice: str, speaks: bool = True) -> None:
        """A stage begins, and the one before is over.

        speaks   False on ranks that leave the word to others, and wait longer
        """
        self._stop()
        text = f"bad: {stage}: no answer in {self._seconds:g} s. {advice}"
        seconds = self._seconds * (1 if speaks else _LISTENERS)
        self._timer = threading.Timer(seconds, self._end, (text,))
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"{self._who}mpipar doctor: {text}\n")
        sys.stderr.flush()
        time.sleep(LAST_WORDS_S)
        self._world.Abort(FAILED)
