"""Array maths: one signature, implementations for NumPy, for CPUs and for GPUs."""

import functools
import importlib.util

import numpy as np

from mpipar.ops.base import Ops

__all__ = ["Ops", "bf16_obstacle", "make_ops"]

# Compute type and 16-bit type of each precision
_TYPES = {
    "fp64": ("float64", None),
    "fp32": ("float32", None),
    "bf16": ("float32", "bf16"),
    "fp16": ("float32", "fp16"),
}


def make_ops(
    device: str, precision: str, node_rank: int = 0, attention: str = "auto"
) -> Ops:
    """The ops of a device ("cpu", "cuda", or "auto": CUDA where CuPy finds one).

    precision   "fp64", "fp32", or mixed "bf16" and "fp16" (`Ops`)
    node_rank   place among the ranks of the node; they take its devices in turn
    attention   on CUDA in mixed precision: "auto", "cudnn" or "flash"
    Raises      DeviceError where "cuda" is asked for and cannot be had
    """
    dtype, half = _TYPES[precision]
    if _chosen(device) == "cuda":
        from mpipar.ops.cupy_ops import CupyOps

        return CupyOps(dtype, node_rank, half, attention)
    if importlib.util.find_spec("numba") is None:
        return Ops(np, dtype, half)
    if half is None:
        from mpipar.ops.numpy_ops import NumpyOps

        return NumpyOps(dtype, claim_threads())
    if half == "bf16" and bf16_obstacle() is None:
        from mpipar.ops.bf16_ops import Bf16Ops

        return Bf16Ops(claim_threads())
    from mpipar.ops.half_ops import HalfOps

    return HalfOps(half, claim_threads())


def bf16_obstacle() -> str | None:
    """Why this CPU's products of bf16 numbers go through fp32, which is slow, and what
    to do; None where they do not."""
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
