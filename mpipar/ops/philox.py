"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3", section 3.2).

A value depends on its key and counter alone, never on who draws it or in what order. So
initial weights and dropout masks are the same in every layout.
"""

import math
import zlib
from types import ModuleType
from typing import Any

import numpy as np

Array = Any

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Elements drawn at a time: the working arrays of a block stay in the L2 cache.
_BLOCK = 1 << 13
# On a device: few launches, in some hundred MiB
_DEVICE_BLOCK = 1 << 22


def stream_key(seed: int, name: str) -> tuple[int, int]:
    """The two key words of the stream of `name`: (seed, a 32-bit hash of the name)."""
    return seed & _MASK, zlib.crc32(name.encode()) ^ ((seed >> 32) & _MASK)


def philox4x32(
    counter: tuple[Array, Array, Array, Array],
    key: tuple[int, int],
    xp: ModuleType = np,
) -> tuple[Array, Array, Array, Array]:
    """Four random 32-bit words for each counter.

    Shapes   counter  four integer arrays or scalars that broadcast to shape s
             returns  four uint32 arrays of shape s
    """
    c0, c1, c2, c3 = (
        xp.asarray(c, dtype=xp.uint64) & xp.uint64(_MASK) for c in counter
    )
    k0, k1 = key
    low, shift = xp.uint64(_MASK), xp.uint64(32)
    for _ in range(_ROUNDS):
        p0 = c0 * xp.uint64(_M0)
        p1 = c2 * xp.uint64(_M1)
        c0, c2 = (p1 >> shift) ^ c1 ^ xp.uint64(k0), (p0 >> shift) ^ c3 ^ xp.uint64(k1)
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    words = xp.broadcast_arrays(c0, c1, c2, c3)
    return tuple(w.astype(xp.uint32) for w in words)


def uniform_rows(
    width: int,
    rows: tuple[Array, Array, Array],
    key: tuple[int, int],
    xp: ModuleType = np,
    start: int = 0,
) -> Array:
    """Uniform float32 numbers in [0, 1) with 24 bits, a row for each row counter.

    Element (r, j) is word (start + j) % 4 of counter ((start + j) // 4, *rows[r]).

    Shapes   rows     three arrays that broadcast to (...)
             returns  (..., width)
    """
    first, last = start // 4, (start + width + 3) // 4
    rows = tuple(xp.asarray(r, dtype=xp.uint64)[..., None] for r in rows)
    words = philox4x32((xp.arange(first, last, dtype=xp.uint64), *rows), key, xp)
    flat = xp.stack(words, axis=-1).reshape(*words[0].shape[:-1], -1)
    picked = flat[..., start - 4 * first : start - 4 * first + width]
    return (picked >> xp.uint32(8)).astype(xp.float32) * xp.float32(2.0**-24)


def drop_limit(rate: float) -> int:
    """Draws of 24 bits below it are dropped: those that `uniform_rows` makes smaller
    than the rate in float32."""
    return math.ceil(float(np.float32(rate)) * 2**24)


def normal_at(index: Array, key: tuple[int, int], xp: ModuleType = np) -> Array:
    """Standard normal float64 numbers at the given global element indices.

    Element i takes two 53-bit uniforms from counter i // 2 through Box-Muller: the
    cosine branch when i is even, the sine branch when it is odd. Any slice of a tensor
    is the same slice of the whole tensor.

    Shapes   index (n,) int64;  returns (n,) float64
    """
    out = xp.empty(index.shape, dtype=xp.float64)
    size = _BLOCK if xp is np else _DEVICE_BLOCK
    for lo in range(0, index.size, size):
        i = index[lo : lo + size].astype(xp.uint64)
        pair = i >> xp.uint64(1)
        a, b, c, d = philox4x32((pair, pair >> xp.uint64(32), 0, 0), key, xp)
        radius = xp.sqrt(-2.0 * xp.log(1.0 - _double(a, b, xp)))
        angle = (2.0 * np.pi) * _double(c, d, xp)
        odd = (i & xp.uint64(1)).astype(bool)
        out[lo : lo + size] = radius * xp.where(odd, xp.sin(angle), xp.cos(angle))
    return out


def words_at(
    index: Array, step: int, key: tuple[int, int], xp: ModuleType = np
) -> Array:
    """A random 32-bit word for each global element index, another one in each step.

    Element i takes word i % 4 of counter (i // 4, step), each in two 32-bit halves.

    Shapes   index (n,) int64;  returns (n,) uint32
    """
    out = xp.empty(index.shape, dtype=xp.uint32)
    size = _BLOCK if xp is np else _DEVICE_BLOCK
    for lo in range(0, index.size, size):
        i = index[lo : lo + size].astype(xp.uint64)
        four = i >> xp.uint64(2)
        counter = four, four >> xp.uint64(32), step & _MASK, step >> 32
        words = xp.stack(philox4x32(counter, key, xp))
        own = (i & xp.uint64(3)).astype(xp.int64)
        out[lo : lo + size] = words[own, xp.arange(i.size)]
    return out


def _double(high: Array, low: Array, xp: ModuleType) -> Array:
    """Uniform float64 in [0, 1) with 53 bits from two 32-bit words."""
    a = (high >> xp.uint32(5)).astype(xp.float64)
    b = (low >> xp.uint32(6)).astype(xp.float64)
    return (a * 67108864.0 + b) * (1.0 / 9007199254740992.0)
