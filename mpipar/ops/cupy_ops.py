"""CuPy ops on a CUDA device. CuPy is imported when one is asked for."""

from typing import Any

from mpipar.errors import DeviceError
from mpipar.ops.cuda.gpu import GpuOps, gpu
from mpipar.ops.cuda.ops import CudaOps
from mpipar.ops.cuda.programs import OPTIONS


class CupyOps(GpuOps, CudaOps):
    """CUDA ops on one device: number node_rank modulo the devices.

    Kernels are compiled by NVRTC at first use; CuPy keeps them for later runs.

    attention   "auto", "cudnn" or "flash", see `choose_attention`
    Raises   DeviceError where CuPy is not installed or finds no device, or cuDNN is
             asked for and cannot be had
    """

    def __init__(
        self,
        dtype: str = "float32",
        node_rank: int = 0,
        half: str | None = None,
        attention: str = "auto",
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
        self.gpu = gpu(node_rank % count)
        self.gpu.use()

        def compile_program(text: str, names: tuple[str, ...]) -> Any:
            return cupy.RawModule(code=text, options=OPTIONS, name_expressions=names)

        super().__init__(cupy, compile_program, dtype, half)
        self.choose_attention(attention, self.products.device)

    def device_memory(self) -> dict[str, int]:
        found, size = super().device_memory(), self.products.device.workspace_bytes
        others = max(0, found["device_context"] - size)
        return found | {"device_workspace": size, "device_context": others}
