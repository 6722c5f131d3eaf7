"""A CUDA device of this process: its streams and its memory."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from weakref import WeakMethod

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
        # What CuPy's own pool is limited to, by a call or by CUPY_GPU_MEMORY_LIMIT
        limit = cupy.get_default_memory_pool().get_limit
        self.pool = Pool(self._reserve, cupy.cuda.runtime.free, self._stream, limit)
        self.held: Callable[[], Callable | None] = lambda: None
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
        ask = self.held() or dict
        held = {kind: n for kind, n in ask().items() if n}
        held["others"] = max(0, pool.now - sum(held.values()))
        parts = ", ".join(f"{kind} {n / MIB:,.0f}" for kind, n in held.items())
        free = runtime.memGetInfo()[0]
        return (
            f"GPU {self.number} ({name}) has too little memory: {size / MIB:,.0f} MiB "
            f"are asked for, {free / MIB:,.0f} of {self.total / MIB:,.0f} MiB are free"
            f"{f' ({reason})' if reason else ''}; this rank holds {pool.now / MIB:,.0f}"
            f" MiB ({parts}) of {pool.reserved / MIB:,.0f} MiB reserved; {ADVICE}"
        )


class Recording:
    """What the main stream was given once, and does again with each launch.

    Its arrays have memory of their own: in each launch they lie where they lay when it
    was recorded, and nobody else uses it in between.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._graph = gpu, None
        self._memory = gpu.pool.inner()

    def begin(self) -> None:
        """From here on work is noted, not done."""
        self._gpu.pool.use(self._memory)
        self._gpu.main.begin_capture()

    def end(self) -> None:
        """Work is done again as it comes.   Raises the error of the runtime where some
        of it cannot be recorded"""
        self._gpu.pool.use(None)
        self._graph = self._gpu.main.end_capture()

    def launch(self) -> None:
        """Does it all again."""
        self._graph.launch(self._gpu.main)

    def close(self) -> None:
        """Forgets it, once its last launch has been done."""
        self._gpu.main.synchronize()
        self._graph = None
        self._gpu.pool.drop(self._memory)


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
        # A thread begins on the first device.
        self.xp.cuda.Device(self.gpu.number).use()
        event.synchronize()

    def host_bytes(self, size: int) -> np.ndarray:
        runtime = self.xp.cuda.runtime
        try:
            # CuPy's own pool would round it up to a power of two.
            memory = self.xp.cuda.PinnedMemory(max(1, size))
        except runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            # Copies are right there too, but the host waits for them.
            return super().host_bytes(size)
        raw = (ctypes.c_uint8 * size).from_address(memory.ptr)
        raw.owner = memory
        return np.frombuffer(raw, np.uint8)

    def copy_to_host(self, x: Array, out: np.ndarray) -> None:
        x.get(out=out, blocking=False)

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        recording = Recording(self.gpu)
        recording.begin()
        try:
            yield recording
        except BaseException:
            # Its own error tells more than that of a broken recording.
            with suppress(self.xp.cuda.runtime.CUDARuntimeError):
                recording.end()
            raise
        recording.end()

    def account(self, held: Callable[[], Mapping[str, int]]) -> None:
        self.gpu.held = WeakMethod(held)

    def device_memory(self) -> dict[str, int]:
        return self.gpu.memory()

    def _event(self) -> Event:
        return self.xp.cuda.Event(disable_timing=True)
