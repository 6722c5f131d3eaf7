"""How MPI reads and writes arrays on a device: through pinned host buffers, or itself.

A *window* is a flat array on the device and the bytes that MPI works on in its place:
a pinned buffer (`Staged`) or the array (`Direct`). Work on a device is done in the
order of its stream, MPI's at once, so that every move has its wait:

    fetch    what kernels have written gets to where MPI reads; `wait` waits for it
    clear    waits until MPI may write
    store    what MPI wrote gets into the array
    close    buffers are free for others
    join     later work of the caller's stream comes after all that

Copies out have a stream of their own, as have copies in together with the sums of what
arrived: neither waits for the work of a later operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpipar.comm.handle import Handle

Array = Any
Span = tuple[int, int]  # first and last byte of a part, the last one left out

# Parts of a message that are copied while others travel
STAGED_BYTES = 8 << 20
# Pinned memory that is kept for later, and the smallest buffer
KEPT_BYTES = 1 << 30
_SMALLEST = 1 << 12


class Pinned:
    """Pinned host buffers, sizes powers of two, used again once the device is done.

    allocate   makes an array of so many bytes;  limit  bytes that are kept for later
    """

    def __init__(
        self, allocate: Callable[[int], np.ndarray], limit: int = KEPT_BYTES
    ) -> None:
        self._allocate, self._limit = allocate, limit
        self._free: dict[int, list[np.ndarray]] = {}
        self._busy: deque[tuple[Any, np.ndarray]] = deque()
        self.kept = 0

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer of at least so many bytes; its contents are anything."""
        self._sweep()
        size = max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            self.kept -= size
            return free.pop()
        return self._allocate(size)

    def give_back(self, buffer: np.ndarray, event: Any) -> None:
        """Takes a buffer back, which the device reads until ``event``."""
        self._busy.append((event, buffer))

    def _sweep(self) -> None:
        while self._busy and (self._busy[0][0] is None or self._busy[0][0].done):
            buffer = self._busy.popleft()[1]
            if self.kept + buffer.size <= self._limit:
                self.kept += buffer.size
                self._free.setdefault(buffer.size, []).append(buffer)


class Lane:
    """The operation whose MPI calls have not been made yet, as its copy is under way.

    There is one at most: it is posted when another one begins, or when any is waited
    for, so that no rank waits for what this one only seems to have begun.
    """

    def __init__(self) -> None:
        self._pending: Handle | None = None

    def add(self, handle: Handle) -> None:
        """``handle`` is waiting for a copy, behind that of the one before."""
        self.settle()
        self._pending = handle

    def settle(self) -> None:
        """Waits for that copy, and makes the calls."""
        handle, self._pending = self._pending, None
        if handle is not None:
            handle.post()


class DeviceMemory:
    """The streams of one rank's messages; `Staged` and `Direct` say what MPI sees.

    ops   those of the device (`mpipar.ops.Ops`)
    """

    name: str
    chunk_bytes: int

    def __init__(self, ops: Any) -> None:
        import cupy

        self.ops, self.cupy = ops, cupy
        self.leaving = cupy.cuda.Stream(non_blocking=True)
        self.arriving = cupy.cuda.Stream(non_blocking=True)
        self.lane = Lane()

    def window(self, flat: Array, stream: Any = None) -> Window:
        """A window on a flat contiguous array that ``stream`` (None: the current one)
        has written, or freed for others to write."""
        raise NotImplementedError

    def record(self, stream: Any = None) -> Any:
        """An event behind all work given to ``stream``, or to the current one."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream or self.cupy.cuda.get_current_stream())
        return event

    def join(self) -> None:
        """Later work of the current stream comes after all that has arrived."""
        event = self.record(self.arriving)
        self.cupy.cuda.get_current_stream().wait_event(event)

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """An array for work of the stream ``arriving``."""
        with self.arriving:
            return self.cupy.empty(shape, dtype)


class Window:
    """A flat array on the device. ``seen`` are the (bytes,) that MPI works on."""

    seen: Array

    def __init__(self, memory: DeviceMemory, flat: Array, stream: Any) -> None:
        self.memory, self.flat = memory, flat
        self.bytes = flat.view(np.uint8)
        self.began = memory.record(stream)
        self._entered = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.flat.nbytes

    def fetch(self, *spans: Span, stream: Any = None) -> None:
        """Let MPI read these parts, all unless told; ``ready`` tells when. ``stream``
        is the one that has written them, the window's own unless told."""
        raise NotImplementedError

    def ready(self, end: int | None = None) -> bool:
        """True once all that was fetched, or that up to byte ``end``, can be read."""
        raise NotImplementedError

    def wait(self, end: int | None = None) -> None:
        """Wait until ``ready`` would be True."""
        raise NotImplementedError

    def clear(self) -> None:
        """Wait until MPI may write."""
        raise NotImplementedError

    def enter(self) -> Any:
        """The stream of what arrives, which from now on follows the window's."""
        if not self._entered:
            self.memory.arriving.wait_event(self.began)
            self._entered = True
        return self.memory.arriving

    def store(self, *spans: Span) -> None:
        """Put what MPI wrote in these parts, all unless told, into the array."""
        raise NotImplementedError

    def close(self) -> None:
        """MPI is done."""


class Staged(DeviceMemory):
    """MPI works on pinned host buffers."""

    name = "staged"
    chunk_bytes = STAGED_BYTES

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        self.pinned = Pinned(_pinned)

    def window(self, flat: Array, stream: Any = None) -> Window:
        return StagedWindow(self, flat, stream)


class StagedWindow(Window):
    """A pinned buffer beside the array."""

    def __init__(self, memory: Staged, flat: Array, stream: Any) -> None:
        super().__init__(memory, flat, stream)
        self._buffer = memory.pinned.take(flat.nbytes)
        self.seen = self._buffer[: flat.nbytes]
        # Where each copy begins, and its event
        self._copies: list[tuple[int, Any]] = []

    def fetch(self, *spans: Span, stream: Any = None) -> None:
        on = stream or self.memory.leaving
        if stream is None:
            on.wait_event(self.began)
        for lo, hi in spans or ((0, self.nbytes),):
            for at in range(lo, hi, STAGED_BYTES):
                self._copy(at, min(at + STAGED_BYTES, hi), on, out=True)
                self._copies.append((at, self.memory.record(on)))

    def ready(self, end: int | None = None) -> bool:
        return all(event.done for event in self._needed(end))

    def wait(self, end: int | None = None) -> None:
        for event in self._needed(end):
            event.synchronize()

    def clear(self) -> None:
        """The buffer is nobody's but the window's."""

    def store(self, *spans: Span) -> None:
        on = self.enter()
        for lo, hi in spans or ((0, self.nbytes),):
            self._copy(lo, hi, on, out=False)

    def close(self) -> None:
        event = self.memory.record(self.memory.arriving) if self._entered else None
        self.memory.pinned.give_back(self._buffer, event)

    def _copy(self, lo: int, hi: int, stream: Any, *, out: bool) -> None:
        runtime = self.memory.cupy.cuda.runtime
        host, device = self.seen.ctypes.data + lo, self.bytes.data.ptr + lo
        if hi <= lo:
            return
        if out:
            kind = runtime.memcpyDeviceToHost
            runtime.memcpyAsync(host, device, hi - lo, kind, stream.ptr)
        else:
            kind = runtime.memcpyHostToDevice
            runtime.memcpyAsync(device, host, hi - lo, kind, stream.ptr)

    def _needed(self, end: int | None) -> Iterator[Any]:
        """Events of the copies of what lies before a byte."""
        return (event for at, event in self._copies if end is None or at < end)


class Direct(DeviceMemory):
    """MPI reads and writes the memory of the device itself (CUDA-aware)."""

    name = "cuda_aware"
    chunk_bytes = 1 << 30

    def window(self, flat: Array, stream: Any = None) -> Window:
        return DirectWindow(self, flat, stream)


class DirectWindow(Window):
    """The array itself; MPI knows no streams, so the host waits for them."""

    def __init__(self, memory: Direct, flat: Array, stream: Any) -> None:
        super().__init__(memory, flat, stream)
        self.seen = self.bytes
        self._event = self.began

    def fetch(self, *spans: Span, stream: Any = None) -> None:
        if stream is not None:
            self._event = self.memory.record(stream)

    def ready(self, end: int | None = None) -> bool:
        return self._event.done

    def wait(self, end: int | None = None) -> None:
        self._event.synchronize()

    def clear(self) -> None:
        self.began.synchronize()

    def store(self, *spans: Span) -> None:
        """MPI's writes are complete, and seen by all kernels launched from now on."""


def _pinned(size: int) -> np.ndarray:
    import cupyx

    return cupyx.empty_pinned(size, np.uint8)
