"""16-bit floats as arrays: fp16 is NumPy's float16; bf16, which NumPy has not, is the
upper half of a float32, kept as uint16.

Everywhere in mpipar an array of uint16 holds bf16 bits. Sums are made in float32 and
rounded once, to the nearest even.
"""

from collections.abc import Sequence

import numpy as np

BF16, FP16 = np.dtype(np.uint16), np.dtype(np.float16)
HALVES = {"bf16": BF16, "fp16": FP16}
NAMES = {dtype: name for name, dtype in HALVES.items()}
_BLOCK = 1 << 15  # items of a block that stays in the cache between two passes


def is_half(dtype: np.dtype) -> bool:
    """True for the types that stand for 16-bit floats."""
    return dtype in NAMES


def widen(x: np.ndarray) -> np.ndarray:
    """The numbers of a 16-bit array in float32; an array of another type as it is."""
    if x.dtype == BF16:
        return np.left_shift(x, 16, dtype=np.uint32).view(np.float32)
    return x.astype(np.float32) if x.dtype == FP16 else x


def narrow(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out = x (float32) rounded to the type of out; NaN stays NaN."""
    if out.dtype != BF16:
        with np.errstate(over="ignore"):
            out[...] = x
        return out
    bits = x.astype(np.float32, order="C", copy=False).view(np.uint32)
    rounded = np.right_shift(bits, 16)
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    out[...] = rounded
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FC0
    return out


def narrow_stochastic(x: np.ndarray, words: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out = x (float32) rounded up or down to the type of out; NaN stays NaN.

    The odds are the distances to both neighbours, so that the mean is x itself: a
    random number below one unit of the last place is added, and the rest is cut off.
    Beyond the largest number infinity takes the place of the next one.

    words    (n,) uint32, uniform;  x, out  (n,)
    Source   Gupta et al. 2015 (Deep learning with limited numerical precision)
    """
    bits = x.view(np.uint32)
    if out.dtype == BF16:
        out[...] = (bits + (words >> 16)) >> 16
        out[np.isnan(x)] = 0x7FC0
        return out
    # Beside the leading bit, 10 bits of a mantissa stay; of a number that is too small
    # for that, fewer: its last place is 2⁻²⁴.
    exponent = (bits >> 23 & 0xFF).astype(np.int64)
    mantissa = (bits & 0x7FFFFF | 0x800000).astype(np.uint64)
    dropped = np.clip(126 - exponent, 13, 63).astype(np.uint64)
    kept = ((mantissa << np.uint64(32) >> dropped) + words) >> np.uint64(32)
    kept += (np.maximum(exponent - 113, 0) << 10).astype(np.uint64)
    kept = np.where(exponent > 142, np.uint64(0x7C00), kept)
    kept = np.where(np.isnan(x), np.uint64(0x7E00), kept)
    out.view(np.uint16)[...] = kept | (bits >> 16 & 0x8000)
    return out


def add_up(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """out = Σ parts in order; flat arrays, out 16-bit or float32."""
    with np.errstate(invalid="ignore"):
        for at in range(0, len(out), _BLOCK):
            piece = slice(at, at + _BLOCK)
            total = widen(parts[0][piece])
            for part in parts[1:]:
                total += widen(part[piece])
            narrow(total, out[piece])
