"""The types that numbers are saved in.

bfloat16 is a type of its own in the file, which HDF5 converts when it is read: h5py
gives float32. In memory it is carried as its bits, as everywhere (`ops.half`).
"""

from typing import Any

import h5py
import numpy as np

from mpipar.ops.half import narrow, widen

# Type by name → how arrays of it are kept in memory
FLOATS = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def file_type(name: str) -> Any:
    """The HDF5 type, little-endian."""
    if name != "bfloat16":
        return h5py.h5t.py_create(FLOATS[name].newbyteorder("<"))
    # Bit 15 is the sign, then 8 bits of exponent and 7 of mantissa.
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_precision(16)
    kind.set_ebias(127)
    return kind


def wide(x: np.ndarray, name: str) -> np.ndarray:
    """Saved numbers as floats that NumPy computes with."""
    return widen(x) if name == "bfloat16" else x


def converted(x: np.ndarray, name: str, to: str) -> np.ndarray:
    """Saved numbers of one type in another one, rounded to nearest even."""
    if name == to:
        return x
    plain = wide(x, name)
    if to != "bfloat16":
        return plain.astype(FLOATS[to])
    single = plain.astype(np.float32)
    if plain.dtype == np.float64:
        # What lies beside a tie may not be rounded to it first.
        tie = (single.view(np.uint32) & 0xFFFF) == 0x8000
        aside = np.where(plain > single, np.inf, -np.inf).astype(np.float32)
        moved = np.nextafter(single, aside)
        single = np.where(tie & (single != plain), moved, single)
    return narrow(single, np.empty(x.shape, np.uint16))
