"""cupy.cuda.runtime: devices, memory, copies.

CUPY_EMULATOR_DEVICES, CUPY_EMULATOR_MEMORY   how many devices, bytes of each
"""

import ctypes
import os

import numpy as np

from cupy.cuda import streams

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost = 0, 1, 2
memcpyDeviceToDevice, memcpyDefault = 3, 4

_device = 0
_blocks: dict[int, np.ndarray] = {}


class CUDARuntimeError(RuntimeError):
    """What a call of the runtime returned."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message or f"cudaError {status}")
        self.status = status


def _count() -> int:
    return int(os.environ.get("CUPY_EMULATOR_DEVICES", 1))


def _size() -> int:
    return int(os.environ.get("CUPY_EMULATOR_MEMORY", 4 << 30))


def getDeviceCount() -> int:
    if _count() == 0:
        raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device")
    return _count()


def getDevice() -> int:
    return _device


def setDevice(device: int) -> None:
    global _device
    if not 0 <= device < _count():
        raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")
    _device = device


def getDeviceProperties(device: int) -> dict:
    return {
        "name": b"Emulated GPU", "major": 9, "minor": 0, "multiProcessorCount": 132,
        "totalGlobalMem": _size(), "clockRate": 1980000, "memoryClockRate": 3201000,
        "memoryBusWidth": 6144, "sharedMemPerBlockOptin": 232448,
        "pciBusID": device + 1, "pciDeviceID": 0, "pciDomainID": 0,
        "uuid": b"emulated" + bytes([device] * 8),
    }  # fmt: skip


def deviceGetPCIBusId(device: int) -> str:
    return f"0000:{device + 1:02X}:00.0"


def driverGetVersion() -> int:
    return 13000


def runtimeGetVersion() -> int:
    return 12090


def memGetInfo() -> tuple[int, int]:
    return _size() - sum(len(block) for block in _blocks.values()), _size()


def malloc(size: int) -> int:
    from cupy.cuda.memory import UNWRITTEN

    if size > memGetInfo()[0]:
        raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
    streams.counts["mallocs"] += 1
    block = np.full(size + 512, UNWRITTEN, np.uint8)
    ptr = -(-block.ctypes.data // 512) * 512
    _blocks[ptr] = block
    return ptr


def free(ptr: int) -> None:
    # cudaFree waits for the device
    streams.run_all()
    del _blocks[ptr]


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    def copy() -> None:
        ctypes.memmove(dst, src, size)

    streams.queues[stream].submit(copy)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    memcpyAsync(dst, src, size, kind, 0)
    streams.null.synchronize()


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    streams.queues[stream].submit(lambda: ctypes.memset(ptr, value, size))


def deviceSynchronize() -> None:
    streams.counts["waits"] += 1
    streams.run_all()


def streamSynchronize(stream: int) -> None:
    streams.queues[stream].synchronize()
