"""Work that waits in streams, as on a device that is always late.

Each stream has a queue. Kernels and copies join it and are done only when something
waits: the host for the stream or for one of its events, another stream for an event,
or an array operation of the current stream. So what was not waited for has not
happened, the worst that a GPU may do.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

# What a test may count: waits of the host, kernels and graphs launched, calls of
# cudaMalloc
counts = {"waits": 0, "launches": 0, "graphs": 0, "mallocs": 0}


class Queue:
    """The work of one stream. `blocking` ones take turns with the null stream."""

    def __init__(self, ptr: int, *, blocking: bool) -> None:
        self.ptr, self.blocking = ptr, blocking
        self.work: deque[Callable[[], Any]] = deque()
        # What a graph is being made of
        self.recording: list[Callable[[], Any]] | None = None

    def submit(self, work: Callable[[], Any]) -> None:
        """Does the work some time. It keeps no memory of the device alive."""
        if self.recording is not None:
            self.recording.append(work)
            return
        if self.blocking:
            others = [null] if self is not null else _blocking()
            for queue in others:
                if queue is not self:
                    queue.run()
        self.work.append(work)

    def run(self, until: "Mark | None" = None) -> None:
        """Does what is waiting, or what is up to a marker; one thread at a time."""
        with _running:
            while self.work and not (until and until.passed):
                self.work.popleft()()

    def synchronize(self) -> None:
        """The host waits."""
        refuse_capture(self)
        counts["waits"] += 1
        self.run()


class Mark:
    """A place in a queue."""

    def __init__(self) -> None:
        self.queue: Queue | None = None
        self.time: float | None = None

    def put(self, queue: Queue) -> None:
        self.queue, self.time = queue, None
        queue.submit(self._pass)

    def _pass(self) -> None:
        self.time = time.perf_counter()

    @property
    def passed(self) -> bool:
        return self.queue is None or self.time is not None

    def run(self) -> None:
        """Does the work up to here."""
        if not self.passed:
            self.queue.run(until=self)


_running = threading.RLock()
null = Queue(0, blocking=True)
queues: dict[int, Queue] = {0: null}
_current = threading.local()


def _blocking() -> list[Queue]:
    return [queue for queue in list(queues.values()) if queue.blocking]


def make(*, blocking: bool) -> Queue:
    ptr = max(queues) + 8
    queues[ptr] = Queue(ptr, blocking=blocking)
    return queues[ptr]


def current() -> Queue:
    return getattr(_current, "queue", null)


def set_current(queue: Queue) -> None:
    _current.queue = queue


def of(stream: Any) -> Queue:
    """The queue of a Stream, or the current one."""
    return current() if stream is None else queues[stream.ptr]


def refuse_capture(queue: Queue) -> None:
    """Raises where a stream may not be used so while it is captured."""
    if queue.recording is not None:
        from cupy.cuda.runtime import CUDARuntimeError

        raise CUDARuntimeError(
            900, "cudaErrorStreamCaptureUnsupported: not when stream is capturing"
        )


def do(work: Callable[[], Any]) -> None:
    """Work of an array operation: at once, or recorded."""
    if current().recording is not None:
        current().recording.append(work)
    else:
        run_current()
        work()


def run_current() -> None:
    """Before an array operation, which is done at once: what is before it."""
    queue = current()
    if queue.recording is not None:
        return
    for other in _blocking() if queue is null else [null] if queue.blocking else []:
        other.run()
    queue.run()


def run_all() -> None:
    for queue in list(queues.values()):
        queue.run()
