"""A CUDA device of this process: its streams and its memory."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from mpipar.errors import DeviceMemoryError
from mpipar.ops.cuda.arena import Pool
from mpipar.ops.device import DeviceOps, Event

Array = Any
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
MIB = 1 << 20
ADVICE = (
    'a smaller train.micro_batch, train.recompute = "selective" or "full", '
    "parallel.zero = 1 to 3, or more ranks of parallel.tensor or parallel.pipeline "
    "would need less"
)


class Gpu:
    """Two streams, and a pool that all arrays of CuPy come from.

    The main stream is made the current one of the thread. It is not the default one:
    that cannot be recorded.

    number   of the device
    """

    def __init__(self, number: int) -> None:
        import cupy

        self.cupy, self.number = cupy, number
        cupy.cuda.Device(number).use()
        self.main = cupy.cuda.Stream(non_blocking=True)
        self.side = cupy.cuda.Stream(non_blocking=True)
        self.total = cupy.cuda.runtime.memGetInfo()[1]
        # Reservations when it was last looked at, and what others took then
        self._context = -1, 0
        self.pool = Pool(self._reserve, cupy.cuda.runtime.free, self._stream)
        self.held: Callable[[], Mapping[str, int]] = dict
        allocator = cupy.cuda.PythonFunctionAllocator(self._malloc, self.pool.free)
        cupy.cuda.set_allocator(allocator.malloc)
        self.main.use()

    def use(self) -> None:
        """Makes it the device of this thread, and its main stream the current one."""
        self.cupy.cuda.Device(self.number).use()
        self.main.use()

    def memory(self) -> dict[str, int]:
        """As `Ops.device_memory`; a new peak begins."""
        pool = self.pool
        found = {"device_peak": pool.peak, "device_reserved": pool.reserved}
        pool.reset_peak()
        return found | {"device_context": self.context}

    @property
    def context(self) -> int:
        """Bytes that are neither free nor reserved; looked at after each growth."""
        count = self.pool.reservations
        if self._context[0] != count:
            free, total = self.cupy.cuda.runtime.memGetInfo()
            self._context = count, max(0, total - free - self.pool.reserved)
        return self._context[1]

    def _malloc(self, size: int, device: int) -> int:
        try:
            return self.pool.malloc(size)
        except MemoryError as error:
            raise DeviceMemoryError(self._explain(size, str(error))) from None

    def _reserve(self, size: int) -> int:
        runtime = self.cupy.cuda.runtime
        try:
            return runtime.malloc(size)
        except runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            raise MemoryError from None

    def _stream(self) -> int:
        return self.cupy.cuda.get_current_stream().ptr

    def _explain(self, size: int, reason: str) -> str:
        """What is asked for, what there is, and what holds it."""
        runtime, pool = self.cupy.cuda.runtime, self.pool
        name = runtime.getDeviceProperties(self.number)["name"].decode()
        held = {kind: n for kind, n in self.held().items() if n}
        held["others"] = max(0, pool.now - sum(held.values()))
        parts = ", ".join(f"{kind} {n / MIB:,.0f}" for kind, n in held.items())
        free = runtime.memGetInfo()[0]
        return (
            f"GPU {self.number} ({name}) has too little memory: {size / MIB:,.0f} MiB "
            f"are asked for, {free / MIB:,.0f} of {self.total / MIB:,.0f} MiB are free"
            f"{f' ({reason})' if reason else ''}; this rank holds {pool.now / MIB:,.0f}"
            f" MiB ({parts}) of {pool.reserved / MIB:,.0f} MiB reserved; {ADVICE}"
        )


@cache
def gpu(number: int) -> Gpu:
    """The device of a number; one for all ops of the process."""
    return Gpu(number)


class GpuOps(DeviceOps):
    """The words of `Ops` on a CUDA device."""

    gpu: Gpu

    def to_host(self, x: Array) -> np.ndarray:
        return self.xp.asnumpy(x)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        gpu = self.gpu
        gpu.side.wait_event(gpu.main.record(self._event()))
        with gpu.side:
            yield

    def record(self) -> Event:
        return self.xp.cuda.get_current_stream().record(self._event())

    def wait(self, event: Event) -> None:
        self.xp.cuda.get_current_stream().wait_event(event)

    def finish(self, event: Event) -> None:
        event.synchronize()

    def host_bytes(self, size: int) -> np.ndarray:
        # CuPy's own pool would round it up to a power of two.
        memory = self.xp.cuda.PinnedMemory(max(1, size))
        raw = (ctypes.c_uint8 * size).from_address(memory.ptr)
        raw.owner = memory
        return np.frombuffer(raw, np.uint8)

    def copy_to_host(self, x: Array, out: np.ndarray) -> None:
        x.get(out=out, blocking=False)

    def account(self, held: Callable[[], Mapping[str, int]]) -> None:
        self.gpu.held = held

    def device_memory(self) -> dict[str, int]:
        return self.gpu.memory()

    def _event(self) -> Event:
        return self.xp.cuda.Event(disable_timing=True)
