"""An operation under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from mpipar.comm import mpi
from mpipar.comm.bell import Bell, Pause
from mpipar.comm.calls import Call, CallLog
from mpipar.comm.counters import Tally
from mpipar.comm.transport import Array
from mpipar.errors import CommError

if TYPE_CHECKING:
    from mpipar.comm.memory import Lane, Window

# What each further step waits for, and the call that it belongs to: requests, or a copy
# after which the next step can make its MPI calls
Follow = Iterator["tuple[Call | None, list[mpi.Request] | Window]"]


class Handle:
    """What a ``_start`` form returns. The arrays given to it are MPI's until ``wait``.

    ``finish`` makes the result once MPI is done; ``expected`` are the bytes that each
    request must have received, checked where it is given. ``follow`` is for operations
    of several steps: when the requests are complete it is asked for those of the next
    one, and for its call where that is another one. ``held`` is what MPI reads: it
    must live until then, and mpi4py's requests (Ireduce_scatter) do not see to that.
    ``lane`` has the operation that waits for a copy from a device.
    """

    __slots__ = (
        "_bell", "_call", "_expected", "_finish", "_follow", "_held", "_lane", "_log",
        "_pause", "_requests", "_result", "_tally", "_waited",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        log: CallLog,
        tally: Tally,
        bell: Bell | None,
        pause: Pause,
        held: object = None,
        lane: Lane | None = None,
    ) -> None:
        self._held = held
        self._lane = lane
        self._call = call
        self._log = log
        self._tally = tally
        self._bell = bell
        self._pause = pause
        self._requests: list[mpi.Request] | Window = []
        self._expected: list[int] | None = None
        self._finish: Callable[[], Array] | None = None
        self._follow: Follow = iter(())
        self._result: Array = None
        self._waited = False

    @property
    def call(self) -> Call:
        """Its record."""
        return self._call

    @property
    def op(self) -> str:
        """Name of the operation."""
        return self._call.op

    def launch(
        self,
        posts: Iterable[mpi.Request | None],
        finish: Callable[[], Array],
        expected: list[int] | None = None,
        follow: Follow | None = None,
    ) -> Handle:
        """Make the MPI calls of ``posts``; blocking ones give None and are complete."""
        try:
            self._requests = [post for post in posts if post is not None]
        finally:
            self._log.current = None
        self._ring()
        spent = time.perf_counter() - self._call.started
        self._tally.seconds += spent
        if not self._requests:
            self._tally.wait += spent
        self._finish = finish
        self._expected = expected
        if follow is not None:
            self._follow = follow
        return self

    def launch_steps(
        self, steps: Iterator[list[mpi.Request] | Window], finish: Callable[[], Array]
    ) -> Handle:
        """Begin with the first of ``steps``, a copy; the MPI calls come after it."""
        self._finish = finish
        self._follow = ((None, step) for step in steps)
        try:
            self._turn()
        finally:
            self._log.current = None
        self._tally.seconds += time.perf_counter() - self._call.started
        if self._requests:
            self._lane.add(self)
        return self

    def post(self) -> None:
        """Wait for the copy that is under way, and make the MPI calls behind it."""
        began = time.perf_counter()
        while self._requests and not isinstance(self._requests, list):
            self._complete()
        self._tally.seconds += time.perf_counter() - began

    def test(self) -> bool:
        """Let MPI make progress; True once ``wait`` would return at once."""
        while self._requests:
            statuses = self._statuses()
            if isinstance(self._requests, list):
                done = mpi.Request.Testall(self._requests, statuses)
            else:
                done = self._requests.ready()
            if not done:
                return False
            self._settle(statuses)
        return True

    def wait(self) -> Array:
        """Complete the operation and return its array. A second call returns it again.

        Raises CommError when a message did not have the expected size.
        """
        if not self._waited:
            if self._lane is not None:
                self._lane.settle()
            began = time.perf_counter()
            while self._requests:
                self._complete()
            self._result = self._finish()
            self._finish = self._held = None
            self._waited = True
            self._tally.seconds += time.perf_counter() - began
        return self._result

    def _complete(self) -> None:
        statuses = self._statuses()
        began = self._call.started = time.perf_counter()
        self._log.current = self._call
        try:
            if not isinstance(self._requests, list):
                self._requests.wait()
            elif self._bell is None:
                mpi.Request.Waitall(self._requests, statuses)
            else:
                self._bell.wait(self._requests, statuses, self._pause)
        except mpi.Exception as error:
            raise CommError(self._complaint(str(error))) from error
        finally:
            self._log.current = None
        self._tally.wait += time.perf_counter() - began
        self._settle(statuses)

    def _statuses(self) -> list[mpi.Status] | None:
        return None if self._expected is None else []

    def _settle(self, statuses: list[mpi.Status] | None) -> None:
        """Check the complete requests and turn to the next step, if there is one."""
        self._requests = []
        if statuses is not None:
            got = [status.Get_count(mpi.BYTE) for status in statuses]
            if got != self._expected:
                what = f"{sum(got)} bytes came, {sum(self._expected)} expected"
                raise CommError(self._complaint(what))
            # Its sender may have waited until it was taken
            self._ring()
        self._turn()

    def _turn(self) -> None:
        """Go on to the next step, if there is one."""
        step = next(self._follow, None)
        if step is not None:
            call, self._requests = step
            self._call = call or self._call
            self._ring()

    def _ring(self) -> None:
        """Wake the others of the operation, for which there is something to do now."""
        if self._bell is not None:
            self._bell.ring(self._call.members)

    def _complaint(self, what: str) -> str:
        call = self._call
        name = f"{call.op} #{call.sequence} on axis {call.axis}"
        return f"{name} ({call.channel}): {what}"
