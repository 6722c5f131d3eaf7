"""CuPy ops: the reference on a CUDA device. CuPy is imported when one is asked for."""

from typing import Any

import numpy as np

from mpipar.errors import DeviceError
from mpipar.ops.base import Ops


class CupyOps(Ops):
    """Reference ops on one CUDA device: number node_rank modulo the devices.

    Raises   DeviceError where CuPy is not installed or finds no device.
    """

    def __init__(
        self, dtype: str = "float32", node_rank: int = 0, half: str | None = None
    ) -> None:
        try:
            import cupy
        except ImportError as error:
            raise DeviceError(
                'train.device = "cuda" needs CuPy: pip install "mpipar[cuda12]" or '
                '"mpipar[cuda13]"'
            ) from error
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"CuPy finds no CUDA device: {error}") from error
        if count == 0:
            raise DeviceError("CuPy finds no CUDA device")
        cupy.cuda.Device(node_rank % count).use()
        super().__init__(cupy, dtype, half)

    def to_host(self, x: Any) -> np.ndarray:
        return self.xp.asnumpy(x)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()
