"""Arrays as they were when a save began, copied only where they must be."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpipar.ops import Ops

Array = Any
# Bytes that are written, or copied, at a time
PIECE_BYTES = 4 << 20


class Snapshot:
    """The state between two updates does not change: it is written from where it lies.

    What is not written yet when the next update comes (`freeze`) is copied first, into
    a buffer that is kept for later saves. So a save costs copies only as far as disks
    are slower than a step, and no memory where they are not. Arrays of a GPU are
    copied beside the work of the next step, which waits for it before its update.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self._parts: list[Array] = []
        self._next, self._is_frozen = 0, False
        # What a device is copying, and when it is done
        self._leaving: tuple[list[Array], Any] | None = None
        self._buffer: np.ndarray | None = None
        # Held while a part is in use; whoever wants to freeze closes the gate first,
        # or else the writer would take the lock again and again
        self._lock, self._gate = threading.Lock(), threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def begin(self, arrays: Sequence[Array]) -> None:
        """Takes flat arrays that are about to be written in this order."""
        self._arrive()
        self._leaving = None
        self._parts, self._next, self._is_frozen = [], 0, False
        for x in arrays:
            step = max(1, PIECE_BYTES // x.dtype.itemsize)
            self._parts += [x[i : i + step] for i in range(0, len(x), step)]
        if not self.ops.on_host and self._parts:
            self._leave()

    def parts(self) -> Iterator[np.ndarray]:
        """The contents in order; each may be used until the next one is asked for."""
        self._arrive()
        while self._next < len(self._parts):
            with self._gate:
                pass
            with self._lock:
                yield self.ops.to_host(self._parts[self._next])
                self._next += 1
        self._parts = []

    def freeze(self) -> None:
        """The arrays are about to change: copies what has not been written."""
        if self._is_frozen:
            return
        if self._leaving is not None:
            # The device waits, not the host.
            self._is_frozen = True
            self.ops.wait(self._leaving[1])
            return
        with self._gate, self._lock:
            self._is_frozen = True
            for number, copy in enumerate(self._room(self._next), self._next):
                copy[...] = self._parts[number]
                self._parts[number] = copy

    def _leave(self) -> None:
        """Copies on the side stream, into pinned memory."""
        copies = self._room(0)
        with self.ops.side_stream():
            for x, copy in zip(self._parts, copies, strict=True):
                self.ops.copy_to_host(x, copy)
            self._leaving = self._parts, self.ops.record()
        self._parts = copies

    def _arrive(self) -> None:
        """Waits until what a device copies is here; from any thread."""
        if self._leaving is not None:
            self.ops.finish(self._leaving[1])

    def _room(self, first: int) -> list[np.ndarray]:
        """Where the parts from `first` on are copied to."""
        rest = self._parts[first:]
        size = sum(x.nbytes for x in rest)
        if self._buffer is None or self._buffer.nbytes < size:
            self._buffer = self.ops.host_bytes(size)
        room, place = [], 0
        for x in rest:
            room.append(self._buffer[place : place + x.nbytes].view(x.dtype))
            place += x.nbytes
        return room
