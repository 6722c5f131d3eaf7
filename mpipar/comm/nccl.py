"""Collectives on arrays of a device by NCCL, one communicator for each axis.

Calls join a stream of their own and are watched there: a call is over when its event
is, and the host waits for none. NCCL has no tags and keeps the order of its calls, so
that messages, which come in any order, stay with MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from mpipar.comm import mpi
from mpipar.comm.calls import CallLog
from mpipar.comm.handle import Handle
from mpipar.comm.memory import DeviceMemory
from mpipar.errors import CommError, DeviceError

Array = Any

_TYPES = {
    "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64", "float16": "NCCL_FLOAT16",
    "uint16": "NCCL_BFLOAT16", "int8": "NCCL_INT8", "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32", "uint32": "NCCL_UINT32", "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
}  # fmt: skip
_OPERATIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX"}

# What begins an operation on the stream
Work = Callable[[], None]


class Nccl:
    """Collectives on the ranks of ``comm``, each on a device of its own.

    Each method checks its arrays and returns what makes the calls; ``launch`` does it.
    Sums of 16-bit floats are rounded at every hop, as NCCL makes them, unless they go
    to float32.

    log      where calls under way are noted
    Raises   DeviceError on all ranks where the communicator cannot be made
    """

    def __init__(self, comm: mpi.Comm, memory: DeviceMemory, log: CallLog) -> None:
        from cupy.cuda import nccl

        self._nccl, self._memory, self._log = nccl, memory, log
        self._size, self._rank = comm.size, comm.rank
        name, error = None, None
        if comm.rank == 0:
            name = nccl.get_unique_id()
        name = comm.bcast(name)
        try:
            self._comm = nccl.NcclCommunicator(comm.size, name, comm.rank)
        except (nccl.NcclError, RuntimeError) as problem:
            error = str(problem)
        errors = [text for text in comm.allgather(error) if text]
        if errors:
            failure = DeviceError(
                f'parallel.transport = "nccl": {errors[0]}; try "auto" or "staged"'
            )
            failure.agreed = True
            raise failure
        self.stream = memory.cupy.cuda.Stream(non_blocking=True)

    def launch(self, handle: Handle, work: Work, finish: Callable[[], Array]) -> Handle:
        """Do ``work`` on the stream, behind what the current one was given so far."""
        self.stream.wait_event(self._memory.record())
        work()
        event = self._memory.record(self.stream)
        cuda = self._memory.cupy.cuda
        self._log.queue(handle.call, _Queued(event, cuda.Device()))

        def ordered() -> Array:
            cuda.get_current_stream().wait_event(event)
            return finish()

        return handle.launch((), ordered)

    def all_reduce(self, flat: Array, op: str) -> Work:
        """In place."""
        kind, operation = self._kind(flat.dtype), self._operation(op)
        place = flat.data.ptr
        return lambda: self._comm.allReduce(
            place, place, flat.size, kind, operation, self.stream.ptr
        )

    def reduce_scatter(self, flat: Array, lengths: Sequence[int], out: Array) -> Work:
        """``lengths`` are the items of each rank; ``out`` gets the sum of the own."""
        if out.dtype != flat.dtype:
            return self._sum_wide(flat, lengths, out)
        kind, add = self._kind(flat.dtype), self._operation("sum")
        starts = [flat.data.ptr + at * flat.itemsize for at in _starts(lengths)]

        def work() -> None:
            if len(set(lengths)) == 1:
                self._comm.reduceScatter(
                    flat.data.ptr, out.data.ptr, out.size, kind, add, self.stream.ptr
                )
                return
            with self._group():
                for root, (start, length) in enumerate(
                    zip(starts, lengths, strict=True)
                ):
                    to = out.data.ptr if root == self._rank else start
                    if length:
                        self._comm.reduce(
                            start, to, length, kind, add, root, self.stream.ptr
                        )

        return work

    def all_gather(self, own: Array, out: Array, lengths: Sequence[int] | None) -> Work:
        """``lengths`` are the bytes of each rank."""
        kind, starts = self._nccl.NCCL_UINT8, _starts(lengths)

        def work() -> None:
            if len(set(lengths)) == 1:
                self._comm.allGather(
                    own.data.ptr, out.data.ptr, own.size, kind, self.stream.ptr
                )
                return
            with self._group():
                for root, (start, length) in enumerate(
                    zip(starts, lengths, strict=True)
                ):
                    place = out.data.ptr + start
                    source = own.data.ptr if root == self._rank else place
                    if length:
                        self._comm.broadcast(
                            source, place, length, kind, root, self.stream.ptr
                        )

        return work

    def all_to_all(
        self,
        flat: Array,
        out: Array,
        leaving: Sequence[int],
        arriving: Sequence[int],
    ) -> Work:
        """Bytes that go to each rank and that come from each."""
        return lambda: self._trade(flat, leaving, out, arriving)

    def broadcast(self, flat: Array, root: int) -> Work:
        """In place."""
        kind = self._nccl.NCCL_UINT8
        return lambda: self._comm.broadcast(
            flat.data.ptr, flat.data.ptr, flat.nbytes, kind, root, self.stream.ptr
        )

    def free(self) -> None:
        """Wait for all calls and free the communicator; collective."""
        self.stream.synchronize()
        self._comm.destroy()

    def _sum_wide(self, flat: Array, lengths: Sequence[int], out: Array) -> Work:
        """All are sent their stretches, which each adds up in float32."""
        size, width = self._size, flat.itemsize
        own = lengths[self._rank]

        def work() -> None:
            with self.stream:
                rows = self._memory.cupy.empty((size, own), flat.dtype)
                leaving = [length * width for length in lengths]
                self._trade(flat, leaving, rows, [own * width] * size)
                self._memory.ops.sum_rows(rows, out)

        return work

    def _trade(
        self,
        flat: Array,
        leaving: Sequence[int],
        out: Array,
        arriving: Sequence[int],
    ) -> None:
        kind, stream = self._nccl.NCCL_UINT8, self.stream.ptr
        sent, came = _starts(leaving), _starts(arriving)
        with self._group():
            for rank in range(self._size):
                if leaving[rank]:
                    start = flat.data.ptr + sent[rank]
                    self._comm.send(start, leaving[rank], kind, rank, stream)
                if arriving[rank]:
                    start = out.data.ptr + came[rank]
                    self._comm.recv(start, arriving[rank], kind, rank, stream)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Calls that NCCL begins together."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _kind(self, dtype: np.dtype) -> int:
        if dtype.name not in _TYPES:
            legal = ", ".join(_TYPES)
            raise CommError(f"NCCL has no sum of {dtype}; use {legal}")
        return getattr(self._nccl, _TYPES[dtype.name])

    def _operation(self, op: str) -> int:
        return getattr(self._nccl, _OPERATIONS[op])


class _Queued:
    """An event that any thread may ask for: a thread begins on the first device."""

    def __init__(self, event: Any, device: Any) -> None:
        self._event, self._device = event, device

    @property
    def done(self) -> bool:
        """True once the device has got there."""
        self._device.use()
        return self._event.done


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]
