"""CuPy on a CPU, as far as mpipar uses it, so that its GPU paths run without a GPU.

A process that finds this package on its path (`emulator.path`) sees a machine with
GPUs. Their memory is host memory of its own, NaN until written; NumPy cannot read it
and it does not mix with NumPy's arrays. Kernels of a RawModule and asynchronous copies
are done only when something waits for their stream (`cuda/streams.py`), so that a
missing wait gives wrong numbers. What mpipar does not use is not here.
"""

import numpy as np
from numpy import (  # noqa: F401
    bool_,
    float16,
    float32,
    float64,
    inf,
    int32,
    int64,
    nan,
    newaxis,
    pi,
    uint8,
    uint16,
    uint32,
    uint64,
)

from cupy import (
    _products,  # noqa: F401
    cuda,
)
from cupy._array import asarray, asnumpy, empty, ndarray, wrapped
from cupy._raw import RawModule

__version__ = "14.2.0"
__all__ = ["RawModule", "asarray", "asnumpy", "cuda", "empty", "ndarray"]

array = asarray

_NAMES = (
    "abs add all any append arange argmax argmin argsort array_equal broadcast_arrays "
    "broadcast_to clip concatenate copyto cos count_nonzero cumsum diff divide dot "
    "einsum empty_like equal exp expand_dims flatnonzero floor full full_like greater "
    "isfinite isinf isnan less log logical_and logical_not logical_or logsumexp matmul "
    "max maximum mean min minimum moveaxis multiply nonzero ones ones_like "
    "put_along_axis repeat reshape searchsorted sign sin sort sqrt square squeeze "
    "stack subtract sum swapaxes take take_along_axis tanh tile transpose tril "
    "unique where zeros zeros_like"
)
for _name in _NAMES.split():
    if hasattr(np, _name):
        globals()[_name] = wrapped(getattr(np, _name))


def ascontiguousarray(a: ndarray, dtype: object = None) -> ndarray:
    """`a` itself where it is contiguous and of that type."""
    if (dtype is None or a.dtype == dtype) and a.flags.c_contiguous:
        return a
    return wrapped(np.ascontiguousarray)(a, dtype)


def get_default_memory_pool() -> cuda.MemoryPool:
    """The pool that arrays come from unless an allocator is set."""
    return cuda.memory.default_pool


def get_array_module(*arrays: object) -> object:
    """This package where one of the arrays is its own, else NumPy."""
    import cupy

    return cupy if any(isinstance(a, ndarray) for a in arrays) else np
