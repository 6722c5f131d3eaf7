"""cupy.cuda.Stream and Event over the queues."""

from typing import Any

from cupy.cuda import streams


class Stream:
    """A stream; the current one inside of `with`."""

    null: "Stream"

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        self._queue = streams.null if null else streams.make(blocking=not non_blocking)
        self._before: list[streams.Queue] = []

    @property
    def ptr(self) -> int:
        return self._queue.ptr

    @property
    def done(self) -> bool:
        late = bool(self._queue.work)
        self._queue.run()
        return not late

    def synchronize(self) -> None:
        self._queue.synchronize()

    def use(self) -> "Stream":
        streams.set_current(self._queue)
        return self

    def __enter__(self) -> "Stream":
        self._before.append(streams.current())
        return self.use()

    def __exit__(self, *_: Any) -> None:
        streams.set_current(self._before.pop())

    def record(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        streams.refuse_capture(self._queue)
        mark = event.mark
        self._queue.submit(mark.run)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        self._queue.run()
        self._queue.recording = []

    def end_capture(self) -> "Graph":
        work, self._queue.recording = self._queue.recording, None
        return Graph(work)

    def is_capturing(self) -> bool:
        return self._queue.recording is not None

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        self._queue.submit(lambda: callback(arg))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)


class Graph:
    """What a stream was given while it was captured: done again by each launch.

    Array operations are done once when they are captured, to know their shapes: what
    they make then is not to be relied on.
    """

    def __init__(self, work: list) -> None:
        self._work = work

    def launch(self, stream: "Stream | None" = None) -> None:
        streams.counts["graphs"] += 1
        for work in self._work:
            streams.of(stream).submit(work)

    def upload(self, stream: "Stream | None" = None) -> None:
        pass


class ExternalStream(Stream):
    """The stream with a number."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self._queue, self._before = streams.queues[ptr], []


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Stream:
    return ExternalStream(streams.current().ptr)


class Event:
    """A place in a stream. Asked if it is done, it says no once, and goes on."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False,
        interprocess: bool = False,
    ) -> None:  # fmt: skip
        self.mark = streams.Mark()

    @property
    def done(self) -> bool:
        streams.refuse_capture(streams.current())
        passed = self.mark.passed
        self.mark.run()
        return passed

    def record(self, stream: Stream | None = None) -> None:
        streams.refuse_capture(streams.of(stream))
        self.mark = streams.Mark()
        self.mark.put(streams.of(stream))

    def synchronize(self) -> None:
        streams.counts["waits"] += 1
        self.mark.run()


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds from one event to the other."""
    return 1e3 * max(1e-9, end_event.mark.time - start_event.mark.time)
