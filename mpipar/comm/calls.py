"""What this rank is doing in MPI, noted so cheaply that every call can afford it.

A *channel* is one ordered sequence of operations: all collectives of an axis form one,
and the messages from one rank to another with one tag form one, named alike on both
ends. The n-th entry of a channel must meet the n-th entry on every other member, so
sequence numbers tell who has arrived. The watchdog's thread reads what is noted here.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLLECTIVE = "collective"


@dataclass(slots=True)
class Call:
    """One operation; ``started`` is reset whenever the rank goes inside MPI for it."""

    axis: str
    channel: str
    op: str
    sequence: int
    nbytes: int
    members: Sequence[int]
    started: float


class Channel:
    """A numbered sequence of operations among ``members`` (ranks of the world)."""

    __slots__ = ("axis", "count", "members", "name", "recent")

    def __init__(self, axis: str, name: str, members: Sequence[int]) -> None:
        self.axis = axis
        self.name = name
        self.members = members
        self.count = 0
        self.recent: deque[tuple[int, str]] = deque(maxlen=64)

    def enter(self, op: str, nbytes: int, now: float) -> Call:
        """Note the next operation of this channel and return its record."""
        self.count += 1
        self.recent.append((self.count, op))
        return Call(self.axis, self.name, op, self.count, nbytes, self.members, now)

    def op_at(self, sequence: int) -> str | None:
        """Name of the operation with this number, None if not met or long past."""
        for _ in range(3):
            try:
                return next((op for i, op in self.recent if i == sequence), None)
            except RuntimeError:  # the main thread appended meanwhile: look again
                continue
        return None


class CallLog:
    """The channels of one rank, and the call it is inside of (None: computing).

    Calls that a device makes by itself are queued until their events are done.
    """

    def __init__(self) -> None:
        self.current: Call | None = None
        self.channels: dict[tuple[str, str], Channel] = {}
        self._queued: dict[str, deque[tuple[Call, Any]]] = {}
        self._lock = threading.Lock()

    def queue(self, call: Call, event: Any) -> None:
        """Note a call that a device has been given; ``event`` comes behind it."""
        with self._lock:
            waiting = self._queued.setdefault(call.axis, deque())
            _drop_done(waiting)
            waiting.append((call, event))

    def oldest_queued(self) -> Call | None:
        """The call that devices have been busy with for longest; those of an axis come
        one after the other."""
        with self._lock:
            for waiting in self._queued.values():
                _drop_done(waiting)
            first = [waiting[0][0] for waiting in self._queued.values() if waiting]
        return min(first, key=lambda call: call.started, default=None)

    def channel(self, axis: str, name: str, members: Sequence[int]) -> Channel:
        """Open a channel, numbered from 1."""
        self.channels[axis, name] = Channel(axis, name, members)
        return self.channels[axis, name]


def _drop_done(waiting: deque[tuple[Call, Any]]) -> None:
    """Forget calls whose events are done; the next one begins only then."""
    while waiting and waiting[0][1].done:
        waiting.popleft()
        if waiting:
            call = waiting[0][0]
            call.started = max(call.started, time.perf_counter())
