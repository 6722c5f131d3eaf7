"""An operation under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mpipar.comm import mpi
from mpipar.comm.calls import Call, CallLog
from mpipar.comm.counters import Tally
from mpipar.comm.transport import Array
from mpipar.errors import CommError


class Handle:
    """What a ``_start`` form returns. The arrays given to it are MPI's until ``wait``.

    ``finish`` makes the result once MPI is done; ``expected`` are the bytes that each
    request must have received, checked where it is given.
    """

    __slots__ = (
        "_call", "_expected", "_finish", "_log", "_polite", "_requests", "_result",
        "_tally", "_waited",
    )  # fmt: skip

    def __init__(self, call: Call, log: CallLog, tally: Tally, polite: bool) -> None:
        self._call = call
        self._log = log
        self._tally = tally
        self._polite = polite
        self._requests: list[mpi.Request] = []
        self._expected: list[int] | None = None
        self._finish: Callable[[], Array] | None = None
        self._result: Array = None
        self._waited = False

    def launch(
        self,
        posts: Iterable[mpi.Request | None],
        finish: Callable[[], Array],
        expected: list[int] | None = None,
    ) -> Handle:
        """Make the MPI calls of ``posts``; blocking ones give None and are complete."""
        try:
            self._requests = [post for post in posts if post is not None]
        finally:
            self._log.current = None
        spent = time.perf_counter() - self._call.started
        self._tally.seconds += spent
        if not self._requests:
            self._tally.wait += spent
        self._finish = finish
        self._expected = expected
        return self

    def test(self) -> bool:
        """Let MPI make progress; True once ``wait`` would return at once."""
        if self._requests and not self._waited:
            statuses = self._statuses()
            if mpi.Request.Testall(self._requests, statuses):
                self._check(statuses)
                self._requests = []
        return not self._requests

    def wait(self) -> Array:
        """Complete the operation and return its array. A second call returns it again.

        Raises CommError when a message did not have the expected size.
        """
        if not self._waited:
            began = time.perf_counter()
            if self._requests:
                self._complete(began)
            self._result = self._finish()
            self._finish = None
            self._waited = True
            self._tally.seconds += time.perf_counter() - began
        return self._result

    def _complete(self, began: float) -> None:
        statuses = self._statuses()
        self._call.started = began
        self._log.current = self._call
        try:
            if self._polite:
                wait_politely(self._requests, statuses)
            else:
                mpi.Request.Waitall(self._requests, statuses)
        except mpi.Exception as error:
            raise CommError(self._complaint(str(error))) from error
        finally:
            self._log.current = None
        self._tally.wait += time.perf_counter() - began
        self._requests = []
        self._check(statuses)

    def _statuses(self) -> list[mpi.Status] | None:
        return None if self._expected is None else []

    def _check(self, statuses: list[mpi.Status] | None) -> None:
        if statuses is None:
            return
        got = [status.Get_count(mpi.BYTE) for status in statuses]
        if got != self._expected:
            what = f"{sum(got)} bytes came, {sum(self._expected)} expected"
            raise CommError(self._complaint(what))

    def _complaint(self, what: str) -> str:
        call = self._call
        name = f"{call.op} #{call.sequence} on axis {call.axis}"
        return f"{name} ({call.channel}): {what}"


def wait_politely(
    requests: list[mpi.Request], statuses: list[mpi.Status] | None
) -> None:
    """Complete all requests and leave the core to other ranks meanwhile.

    For more ranks than cores: a spinning MPI wait takes the core from the rank that is
    waited for. The pauses grow, so short waits stay short.
    """
    tries = 0
    while not mpi.Request.Testall(requests, statuses):
        tries += 1
        if tries > 50:
            time.sleep(2e-5 if tries < 300 else 2e-4)
