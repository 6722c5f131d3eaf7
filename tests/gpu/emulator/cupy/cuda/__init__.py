"""cupy.cuda, emulated."""

from typing import Any

from cupy.cuda import memory, runtime, streams
from cupy.cuda.memory import (
    BaseMemory,
    Memory,
    MemoryPointer,
    MemoryPool,
    PinnedMemory,
    PinnedMemoryPointer,
    PythonFunctionAllocator,
    UnownedMemory,
    alloc,
    alloc_pinned_memory,
    get_allocator,
    set_allocator,
)
from cupy.cuda.stream import (
    Event,
    ExternalStream,
    Graph,
    Stream,
    get_current_stream,
    get_elapsed_time,
)

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "Graph",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "PythonFunctionAllocator",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "get_allocator",
    "get_current_stream",
    "get_elapsed_time",
    "memory",
    "runtime",
    "set_allocator",
    "streams",
]


def is_available() -> bool:
    """Whether there is a device."""
    return runtime._count() > 0


class Device:
    """One device; the current one by itself and inside of `with`."""

    def __init__(self, device: Any = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def use(self) -> None:
        runtime.setDevice(self.id)

    def __enter__(self) -> "Device":
        self._before = runtime.getDevice()
        self.use()
        return self

    def __exit__(self, *_: Any) -> None:
        runtime.setDevice(self._before)

    def synchronize(self) -> None:
        runtime.deviceSynchronize()

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def pci_bus_id(self) -> str:
        return runtime.deviceGetPCIBusId(self.id)

    @property
    def mem_info(self) -> tuple[int, int]:
        return runtime.memGetInfo()

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 132, "ClockRate": 1980000}
