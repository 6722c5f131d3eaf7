"""Collectives and messages on arrays of a device; host arrays go as ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpipar.comm import mpi
from mpipar.comm.calls import Channel
from mpipar.comm.checked import CheckedCommunicator
from mpipar.comm.communicator import Communicator
from mpipar.comm.counters import ring_reduce_bytes, ring_scatter_bytes
from mpipar.comm.datatypes import reduction
from mpipar.comm.handle import Handle
from mpipar.comm.memory import DeviceMemory, Window
from mpipar.comm.nccl import Nccl, Work
from mpipar.comm.posts import Poster
from mpipar.comm.relay import Relay, Steps, parts
from mpipar.comm.shapes import (
    Routes,
    check_out,
    gather_sizes,
    route_sizes,
    scatter_sizes,
)
from mpipar.errors import DeviceError
from mpipar.ops.half import is_half

Array = Any


class DeviceCommunicator(Communicator):
    """A Communicator that takes arrays of a device too, once ``use`` was called.

    Collectives on them go through NCCL where it is used, and else, like messages,
    through MPI: `mpipar.comm.relay`. Their ``_start`` forms return as soon as a copy is
    under way; MPI is called at the latest when this rank begins its next operation or
    waits for any. Results are ordered with the stream that is current at ``wait``.
    """

    _memory: DeviceMemory | None = None
    _relay: Relay | None = None
    _nccl: Nccl | None = None

    def use(self, memory: DeviceMemory, nccl: bool) -> None:
        """Say how arrays of the device travel; all ranks of the axis do so.

        nccl   collectives go through NCCL; raises DeviceError where it fails
        """
        self._memory, self._lane = memory, memory.lane
        limit = min(self.chunk_bytes, memory.chunk_bytes)
        self._relay = Relay(self.mpi, memory, limit)
        if nccl:
            with self._inside("nccl_init"):
                self._nccl = Nccl(self.mpi, memory, self._log)

    def broadcast(self, x: Array, root: int = 0) -> Array:
        if isinstance(x, np.ndarray):
            return super().broadcast(x, root)
        flat, handle = self._open("broadcast", x, x.nbytes * (self.rank == root))
        steps = self._way.broadcast(flat, root)
        return self._go(handle, steps, lambda: _back(flat, x)).wait()

    def free(self) -> None:
        for part in (self._nccl, self._relay):
            if part is not None:
                part.free()
        super().free()

    # Collectives

    @property
    def _way(self) -> Nccl | Relay:
        return self._nccl or self._relay

    def _all_reduce(self, x: Array, op: str, poster: Poster) -> Handle:
        if isinstance(x, np.ndarray):
            return super()._all_reduce(x, op, poster)
        if not (op == "sum" and is_half(x.dtype)):
            reduction(x.dtype, op)  # refuses what cannot be reduced
        sent = ring_reduce_bytes(x.size, x.itemsize, self.size, self.rank)
        flat, handle = self._open("all_reduce", x, sent)
        steps = self._way.all_reduce(flat, op)
        return self._go(handle, steps, lambda: _back(flat, x))

    def _all_gather(
        self, x: Array, counts: Sequence[int] | None, out: Array, poster: Poster
    ) -> Handle:
        if isinstance(x, np.ndarray):
            return super()._all_gather(x, counts, out, poster)
        where = f"all_gather on axis {self.name}"
        blocks, shape, sent = gather_sizes(where, x, counts, self.size, self.rank)
        check_out(where, out, shape, x.dtype)
        blocks = blocks or [x.nbytes] * self.size
        flat, handle = self._open("all_gather", x, sent)
        if out is None:
            out = self._memory.ops.xp.empty(shape, x.dtype)
        steps = self._way.all_gather(_bytes(flat), _bytes(out.reshape(-1)), blocks)
        return self._go(handle, steps, lambda: out)

    def _reduce_scatter(
        self, x: Array, counts: Sequence[int] | None, out: Array, poster: Poster
    ) -> Handle:
        if isinstance(x, np.ndarray):
            return super()._reduce_scatter(x, counts, out, poster)
        half = is_half(x.dtype)
        if not half:
            reduction(x.dtype, "sum")
        where = f"reduce_scatter on axis {self.name}"
        blocks, shape = scatter_sizes(where, x, counts, self.size, self.rank)
        wide = half and out is not None and out.dtype == np.float32
        dtype = out.dtype if wide else x.dtype
        check_out(where, out, shape, dtype)
        sent = x.itemsize * ring_scatter_bytes(blocks, self.rank)
        flat, handle = self._open("reduce_scatter", x, sent)
        if out is None:
            out = self._memory.ops.xp.empty(shape, dtype)
        steps = self._way.reduce_scatter(flat, blocks, out.reshape(-1))
        return self._go(handle, steps, lambda: out)

    def _all_to_all(self, x: Array, counts: Routes | None, poster: Poster) -> Handle:
        if isinstance(x, np.ndarray):
            return super()._all_to_all(x, counts, poster)
        where = f"all_to_all on axis {self.name}"
        (leaving, arriving), shape = route_sizes(where, x, counts, self.size)
        flat, handle = self._open("all_to_all", x, x.nbytes - leaving[self.rank])
        out = self._memory.ops.xp.empty(shape, x.dtype)
        flat_out = _bytes(out.reshape(-1))
        steps = self._way.all_to_all(_bytes(flat), flat_out, leaving, arriving)
        return self._go(handle, steps, lambda: out)

    def _open(self, op: str, x: Array, sent: int) -> tuple[Array, Handle]:
        """Count a collective, and make ``x`` flat and contiguous."""
        entered = time.perf_counter()
        flat = self._flat(x)
        return flat, self._enter(op, flat, sent, entered)

    def _flat(self, x: Array) -> Array:
        if self._memory is None or not isinstance(x, self._memory.cupy.ndarray):
            raise DeviceError(
                f"messages need a numpy.ndarray, or a cupy.ndarray where the grid was "
                f"given a device; not {type(x).__module__}.{type(x).__name__}"
            )
        return self._memory.cupy.ascontiguousarray(x).reshape(-1)

    def _go(
        self, handle: Handle, steps: Steps | Work, finish: Callable[[], Array]
    ) -> Handle:
        """Begin: with the first step of those of messages, or all of what is NCCL's."""
        if self._nccl is not None:
            return self._nccl.launch(handle, steps, finish)

        def arrived() -> Array:
            self._memory.join()
            return finish()

        return handle.launch_steps(steps, arrived)

    def _inside(self, op: str) -> AbstractContextManager:
        if self._lane is not None:
            self._lane.settle()
        return super()._inside(op)

    # Messages

    def _begin(
        self,
        op: str,
        x: Array,
        sent: int,
        channel: Channel | None = None,
        calls: int = 1,
    ) -> tuple[np.ndarray | Window, Handle]:
        if self._lane is not None:
            self._lane.settle()
        if isinstance(x, np.ndarray) or self._memory is None:
            return super()._begin(op, x, sent, channel, calls)
        entered = time.perf_counter()
        window = self._memory.window(self._flat(x))
        if sent:
            window.fetch()
        else:
            window.clear()
        return window, self._enter(op, window, sent, entered, channel, calls)

    def _leave(
        self, flat: np.ndarray | Window, to: int, tag: int
    ) -> Iterator[mpi.Request]:
        if isinstance(flat, np.ndarray):
            yield from super()._leave(flat, to, tag)
            return
        post = self.mpi.Issend if self.synchronous else self.mpi.Isend
        for lo, hi in self._parts(flat):
            flat.wait(hi)
            yield post([flat.seen[lo:hi], mpi.BYTE], to, tag)

    def _arrive(
        self, flat: np.ndarray | Window, source: int, tag: int
    ) -> tuple[list[mpi.Request], list[int]]:
        if isinstance(flat, np.ndarray):
            return super()._arrive(flat, source, tag)
        spans = self._parts(flat)
        requests = [
            self.mpi.Irecv([flat.seen[lo:hi], mpi.BYTE], source, tag)
            for lo, hi in spans
        ]
        return requests, [hi - lo for lo, hi in spans]

    def _parts(self, window: Window) -> list[tuple[int, int]]:
        limit = min(self.chunk_bytes, self._memory.chunk_bytes)
        return parts(0, window.nbytes, limit)

    def _sent(self, flat: np.ndarray | Window, x: Array) -> Array:
        if not isinstance(flat, np.ndarray):
            flat.close()
        return x

    def _put_back(self, flat: np.ndarray | Window, x: Array) -> Array:
        if isinstance(flat, np.ndarray):
            return super()._put_back(flat, x)
        flat.store()
        flat.close()
        self._memory.join()
        return _back(flat.flat, x)


class CheckedDeviceCommunicator(CheckedCommunicator, DeviceCommunicator):
    """Both: calls are compared, and arrays of a device travel."""

    def _compare(self, *said: Any) -> None:
        if self._lane is not None:
            self._lane.settle()
        super()._compare(*said)


def _bytes(flat: Array) -> Array:
    return flat.view(np.uint8)


def _back(flat: Array, x: Array) -> Array:
    """Put a flat copy back where ``x`` was not contiguous."""
    if not x.flags.c_contiguous:
        x[...] = flat.reshape(x.shape)
    return x
