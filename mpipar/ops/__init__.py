"""Array maths: one signature, implementations for NumPy, for CPUs and for GPUs."""

import functools
import importlib.util

import numpy as np

from mpipar.ops.base import Ops

__all__ = ["Ops", "bf16_obstacle", "make_ops"]

_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "float32"}


def make_ops(device: str, precision: str, node_rank: int = 0) -> Ops:
    """The ops of a device ("cpu", "cuda", or "auto": CUDA where CuPy finds one).

    precision   "fp64", "fp32", or "bf16": float32 with bf16 matrix products
    node_rank   place among the ranks of the node; they take its devices in turn
    Raises      DeviceError where "cuda" or "bf16" is asked for and cannot be had
    """
    dtype = _DTYPES[precision]
    if _chosen(device) == "cuda":
        from mpipar.ops.cupy_ops import CupyOps

        return CupyOps(dtype, node_rank)
    if importlib.util.find_spec("numba") is None:
        return Ops(np, dtype)
    if precision == "bf16":
        from mpipar.ops.bf16_ops import Bf16Ops

        return Bf16Ops(claim_threads())
    from mpipar.ops.numpy_ops import NumpyOps

    return NumpyOps(dtype, claim_threads())


def bf16_obstacle(device: str) -> str | None:
    """Why "bf16" cannot be had on this device, and what to do; None where it can."""
    if _chosen(device) == "cuda":
        return (
            'bf16 products are for CPUs in this version; use train.precision = "fp32"'
        )
    if importlib.util.find_spec("numba") is None:
        return "bf16 products need numba, which is not installed: pip install numba"
    from mpipar.ops.onednn import why_not

    return why_not()


@functools.cache
def claim_threads() -> int:
    """Threads that BLAS was to use; from now on it uses one, and the ops share them."""
    from threadpoolctl import ThreadpoolController

    blas = ThreadpoolController().select(user_api="blas")
    threads = max((pool["num_threads"] for pool in blas.info()), default=1)
    blas.limit(limits=1)
    return threads


def _chosen(device: str) -> str:
    if device == "auto":
        return "cuda" if cuda_devices() else "cpu"
    return device


def cuda_devices() -> int:
    """Number of CUDA devices that CuPy can use; 0 without CuPy."""
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
