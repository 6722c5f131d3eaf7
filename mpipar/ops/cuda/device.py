"""What matrix products ask of a device: addresses, streams, workspaces, clocks."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any

# Bytes that the library may use beside a product, on devices from Hopper on and before
WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES = 32 << 20, 4 << 20
# Workspaces lie at multiples of so many bytes.
WORKSPACE_ALIGNMENT = 256
# How often work is done when it is timed
REPEATS = 4


class HostDevice:
    """Host memory without streams, for a library that computes on the CPU.

    capability   compute capability of the device it stands for
    major        of its CUDA, 0 = any
    """

    capability = (9, 0)
    major = 0

    def __init__(self) -> None:
        self._workspaces: dict[int, tuple[int, int, Any]] = {}

    @property
    def has_fast_gelu(self) -> bool:
        """True where GELU as a part of a product is faster than a pass of its own.

        Known of Hopper; before it, and on GPUs for desktops after it, it is slower.
        """
        return self.capability[0] == 9

    def address(self, x: Array) -> int:
        """Where an array begins in memory."""
        return x.ctypes.data

    def stream(self) -> int:
        """The stream that works now."""
        return 0

    def is_capturing(self) -> bool:
        """True while a graph records what the stream is given."""
        return False

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Time that the device takes to do some work once."""
        work()
        return 0.0

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspaces of all streams."""
        return sum(size for _, size, _ in self._workspaces.values())

    def workspace(self, stream: int) -> tuple[int, int]:
        """Address and bytes of the memory that products of a stream may use."""
        if stream not in self._workspaces:
            is_large = self.capability >= (9, 0)
            size = WORKSPACE_BYTES if is_large else SMALL_WORKSPACE_BYTES
            at, owner = self._reserve(size)
            self._workspaces[stream] = at, size, owner
        return self._workspaces[stream][:2]

    def allocate(self, size: int) -> tuple[int, Any]:
        """Address of new memory, and what keeps it."""
        memory = np.empty(size + WORKSPACE_ALIGNMENT, np.uint8)
        unaligned = -memory.ctypes.data % WORKSPACE_ALIGNMENT
        return memory.ctypes.data + unaligned, memory

    def _reserve(self, size: int) -> tuple[int, Any]:
        """As `allocate`, for good: not from what others take memory back from."""
        return self.allocate(size)


class CupyDevice(HostDevice):
    """The current device of CuPy, and its current stream."""

    def __init__(self) -> None:
        import cupy

        super().__init__()
        self.cuda = cupy.cuda
        self.major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        digits = cupy.cuda.Device().compute_capability
        self.capability = int(digits[:-1]), int(digits[-1])

    def address(self, x: Array) -> int:
        return x.data.ptr

    def stream(self) -> int:
        return self.cuda.get_current_stream().ptr

    def is_capturing(self) -> bool:
        return self.cuda.get_current_stream().is_capturing()

    def milliseconds(self, work: Callable[[], None]) -> float:
        begin, end = self.cuda.Event(), self.cuda.Event()
        work()
        begin.record()
        for _ in range(REPEATS):
            work()
        end.record()
        end.synchronize()
        return self.cuda.get_elapsed_time(begin, end) / REPEATS

    def allocate(self, size: int) -> tuple[int, Any]:
        memory = self.cuda.alloc(size)
        return memory.ptr, memory

    def _reserve(self, size: int) -> tuple[int, Any]:
        memory = self.cuda.Memory(size)
        return memory.ptr, memory
