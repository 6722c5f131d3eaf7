"""Emulated device memory and pinned memory."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy.cuda import runtime, streams

UNWRITTEN = 0xFF  # NaN in floats, -1 in integers


class OutOfMemoryError(MemoryError):
    """The device has not so much memory left."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} "
            "bytes)."
        )


class BaseMemory:
    """Memory with an address and a size."""

    ptr: int
    size: int
    device_id = 0

    @property
    def device(self) -> Any:
        from cupy.cuda import Device

        return Device(self.device_id)


class Memory(BaseMemory):
    """What cudaMalloc gives."""

    def __init__(self, size: int) -> None:
        self.ptr, self.size = (runtime.malloc(size) if size else 0), size
        self.device_id = runtime.getDevice()

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            runtime.free(self.ptr)


class UnownedMemory(BaseMemory):
    """Memory that somebody else frees."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    device = property(lambda self: self.mem.device)
    device_id = property(lambda self: self.mem.device_id)

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> "MemoryPointer":
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def copy_from_device_async(self, src: Any, size: int, stream: Any = None) -> None:
        _copy(self.ptr, int(src), size, stream)

    copy_from_device = copy_from_device_async

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        _copy(self.ptr, _address(mem), size, stream)

    def copy_from_host(self, mem: Any, size: int) -> None:
        self.copy_from_host_async(mem, size)
        streams.current().synchronize()

    def copy_to_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        _copy(_address(mem), self.ptr, size, stream)

    def copy_to_host(self, mem: Any, size: int) -> None:
        self.copy_to_host_async(mem, size)
        streams.current().synchronize()

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        place = bytes_at(self.ptr, size)
        streams.of(stream).submit(lambda: place.fill(value))

    memset = memset_async


def _copy(to: int, source: int, size: int, stream: Any) -> None:
    runtime.memcpyAsync(to, source, size, 4, streams.of(stream).ptr)


def _address(mem: Any) -> int:
    return int(getattr(mem, "ptr", None) or getattr(mem, "value", None) or mem)


def bytes_at(ptr: int, size: int) -> np.ndarray:
    """NumPy's view of memory, which it does not keep alive."""
    if not ptr:
        return np.empty(size, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(ptr), np.uint8)


# --- allocators -----------------------------------------------------------------------


class MemoryPool:
    """Memory kept for later, by stream and size.

    As in CuPy, memory that was freed is used again at once by arrays of the stream that
    it was made for: work of other streams that still reads it must be waited for.
    """

    def __init__(self, allocator: Callable | None = None) -> None:
        self.limit, self.used = 0, 0
        self.free: dict[tuple[int, int], list[int]] = {}

    def malloc(self, size: int) -> MemoryPointer:
        queue, rounded = streams.current(), -(-size // 512) * 512
        if self.limit and self.used + rounded > self.limit:
            raise OutOfMemoryError(size, self.used, self.limit)
        block = _Pooled(self, queue.ptr, rounded)
        if kept := self.free.get((queue.ptr, rounded)):
            block.ptr = kept.pop()
            used = bytes_at(block.ptr, rounded)
            queue.submit(lambda: used.fill(UNWRITTEN))
        elif rounded:
            try:
                block.ptr = runtime.malloc(rounded)
            except runtime.CUDARuntimeError:
                raise OutOfMemoryError(size, self.used) from None
        self.used += rounded
        return MemoryPointer(block, 0)

    def used_bytes(self) -> int:
        return self.used

    def total_bytes(self) -> int:
        return self.used + self.free_bytes()

    def free_bytes(self) -> int:
        return sum(size * len(kept) for (_, size), kept in self.free.items())

    def free_all_blocks(self, stream: Any = None) -> None:
        for kept in self.free.values():
            while kept:
                runtime.free(kept.pop())

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        total = runtime.memGetInfo()[1]
        self.limit = int(fraction * total) if fraction is not None else size or 0

    def get_limit(self) -> int:
        return self.limit


class _Pooled(BaseMemory):
    """Memory that goes back to its pool."""

    def __init__(self, pool: MemoryPool, stream: int, size: int) -> None:
        self.pool, self.stream, self.ptr, self.size = pool, stream, 0, size

    def __del__(self) -> None:
        if self.ptr:
            self.pool.used -= self.size
            self.pool.free.setdefault((self.stream, self.size), []).append(self.ptr)


class PythonFunctionAllocator:
    """Memory of somebody's own malloc(size, device) → address and free(address,
    device); what was in it before is not to be relied on."""

    def __init__(self, malloc_func: Callable, free_func: Callable) -> None:
        self._functions = malloc_func, free_func

    def malloc(self, size: int) -> MemoryPointer:
        return MemoryPointer(_OfFunctions(size, *self._functions), 0)


class _OfFunctions(BaseMemory):
    """Memory that goes back to somebody's own free."""

    def __init__(self, size: int, malloc: Callable, free: Callable) -> None:
        self.ptr, self.size, self._free = 0, size, free
        if size:
            self.device_id = runtime.getDevice()
            self.ptr = malloc(size, self.device_id)
            used = bytes_at(self.ptr, size)
            streams.current().submit(lambda: used.fill(UNWRITTEN))

    def __del__(self) -> None:
        if self.ptr:
            self._free(self.ptr, self.device_id)


default_pool = MemoryPool()
_allocator: Callable = default_pool.malloc


def alloc(size: int) -> MemoryPointer:
    """Memory of the allocator that is set."""
    return _allocator(size)


def set_allocator(allocator: Callable | None = None) -> None:
    """Where arrays come from; None for cudaMalloc itself."""
    global _allocator
    _allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))


def get_allocator() -> Callable:
    return _allocator


# --- pinned memory --------------------------------------------------------------------

_pinned: list[tuple[int, int]] = []


class PinnedMemoryPointer:
    """Host memory that a device may read and write by itself."""

    def __init__(self, size: int) -> None:
        self._buffer = np.full(max(1, size), UNWRITTEN, np.uint8)
        self.ptr, self._size = self._buffer.ctypes.data, size
        _pinned.append((self.ptr, self.ptr + max(1, size)))

    def size(self) -> int:
        return self._size

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self._buffer)

    @property
    def __array_interface__(self) -> dict:
        return self._buffer.__array_interface__

    def __del__(self) -> None:
        span = self.ptr, self.ptr + max(1, self._size)
        if span in _pinned:
            _pinned.remove(span)


class PinnedMemory:
    """What cudaHostAlloc gives."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self._pointer = PinnedMemoryPointer(size)
        self.ptr, self.size = self._pointer.ptr, size


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    """Pinned memory."""
    return PinnedMemoryPointer(size)


def is_pinned(x: np.ndarray) -> bool:
    """Whether an array of NumPy lies in pinned memory."""
    at = x.ctypes.data
    return any(low <= at < high for low, high in list(_pinned))
