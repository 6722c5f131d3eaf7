"""Array maths: one signature, a NumPy and a CuPy implementation."""

from mpipar.ops.base import Ops

__all__ = ["Ops", "make_ops"]

_DTYPES = {"fp64": "float64", "fp32": "float32"}


def make_ops(device: str, precision: str, node_rank: int = 0) -> Ops:
    """The ops of a device ("cpu", "cuda", or "auto": CUDA where CuPy finds one).

    precision   "fp64" or "fp32"
    node_rank   place among the ranks of the node; they take its devices in turn
    Raises      DeviceError where "cuda" is asked for and cannot be had
    """
    dtype = _DTYPES[precision]
    if device == "auto":
        device = "cuda" if cuda_devices() else "cpu"
    if device == "cuda":
        from mpipar.ops.cupy_ops import CupyOps

        return CupyOps(dtype, node_rank)
    from mpipar.ops.numpy_ops import NumpyOps

    return NumpyOps(dtype)


def cuda_devices() -> int:
    """Number of CUDA devices that CuPy can use; 0 without CuPy."""
    import importlib.util

    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
