"""From NumPy's dtypes to MPI's: explicit in every message.

uint16 is not among the integers: here it holds the bits of bf16 (`mpipar.ops.half`).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from mpipar.comm import mpi
from mpipar.errors import CommError

_OPERATIONS = {"sum": "SUM", "max": "MAX"}
_REDUCED = {np.dtype(code) for code in "bhilqBILQfd"}


@cache
def reduction(dtype: np.dtype, op: str) -> tuple[mpi.Datatype, mpi.Op]:
    """Return what MPI needs to reduce arrays of ``dtype`` by ``op`` ("sum", "max").

    Raises CommError for dtypes that MPI cannot add up: 16-bit floats, bool, complex,
    foreign byte orders and everything that is not a number.
    """
    if op not in _OPERATIONS:
        raise CommError(f"op = {op!r} is not one of {', '.join(_OPERATIONS)}")
    if dtype not in _REDUCED:
        raise CommError(
            f"MPI has no {op} of {dtype}; use float32, float64 or an integer type"
        )
    return mpi.Datatype.fromcode(dtype.char), getattr(mpi, _OPERATIONS[op])


def as_bytes(flat: np.ndarray) -> np.ndarray:
    """Return a contiguous 1-D array as bytes, without a copy, to be moved as it is."""
    if flat.dtype.hasobject:
        raise CommError(f"an array of {flat.dtype} holds Python objects: cannot send")
    return flat.view(np.uint8)
