"""Philox4x32-10: the words of `mpipar.ops.philox`, and what is made of them."""

import math

import numpy as np

from mpipar.ops.kernels.compile import kernel, part
from mpipar.ops.kernels.intrinsics import real

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@part
def _philox(c0, c1, c2, c3, k0, k1):
    """Four random 32-bit words of a counter and a key, each in a uint64."""
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = (p1 >> _HALF) ^ c1 ^ k0, (p0 >> _HALF) ^ c3 ^ k1
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@part
def _kept(word, limit, factor, zero):
    return factor if word >= limit else zero


@kernel("(u8[::1], u8[::1], u8[::1], u8, u8, u8, u8, T, T[:, ::1], i8, i8)")
def dropout_factors(rows0, rows1, rows2, k0, k1, first, limit, factor, out, lo, hi):
    """out = factor where a word's upper 24 bits reach `limit`, else 0.

    Row i has the counters (first + block, rows0[i], rows1[i], rows2[i]), a block being
    four columns.
    """
    zero = real(0.0, factor)
    blocks = out.shape[1] // 4
    for i in range(lo, hi):
        r0, r1, r2 = rows0[i], rows1[i], rows2[i]
        for block in range(blocks):
            a, b, c, d = _philox(first + np.uint64(block), r0, r1, r2, k0, k1)
            out[i, 4 * block] = _kept(a >> np.uint64(8), limit, factor, zero)
            out[i, 4 * block + 1] = _kept(b >> np.uint64(8), limit, factor, zero)
            out[i, 4 * block + 2] = _kept(c >> np.uint64(8), limit, factor, zero)
            out[i, 4 * block + 3] = _kept(d >> np.uint64(8), limit, factor, zero)


@kernel("(i8, i8, i8, i8, u8, u8, u8, u4[::1], i8, i8)")
def draws(begin, first, width, stride, step, k0, k1, out, lo, hi):
    """out[i] = a word for element begin + i of a box (`Ops.store_stochastic`).

    Element j of the tensor takes word j % 4 of counter (j // 4, step).
    """
    drawn = ~np.uint64(0)  # the counter that a, b, c, d are of; as yet none
    a = b = c = d = np.uint64(0)
    row, column = (begin + lo) // width, (begin + lo) % width
    for i in range(lo, hi):
        index = np.uint64(first + row * stride + column)
        column += 1
        if column == width:
            row, column = row + 1, 0
        four, own = index >> np.uint64(2), index & np.uint64(3)
        if four != drawn:
            drawn = four
            a, b, c, d = _philox(
                four & _LOW, four >> _HALF, step & _LOW, step >> _HALF, k0, k1
            )
        low, high = (a, b) if own < np.uint64(2) else (c, d)
        out[i] = np.uint32(low if own & np.uint64(1) == np.uint64(0) else high)


@part
def _double(high, low):
    """Uniform float64 in [0, 1) with 53 bits from two 32-bit words."""
    a, b = float(high >> np.uint64(5)), float(low >> np.uint64(6))
    return (a * 67108864.0 + b) * (1.0 / 9007199254740992.0)


@kernel("(u8[::1], u8, u8, f8, T[::1], i8, i8)")
def normals(index, k0, k1, std, out, lo, hi):
    """out = std · standard normal numbers of global element indices, by Box-Muller."""
    for i in range(lo, hi):
        pair = index[i] >> np.uint64(1)
        zero = np.uint64(0)
        a, b, c, d = _philox(pair & _LOW, pair >> _HALF, zero, zero, k0, k1)
        radius = std * math.sqrt(-2.0 * math.log(1.0 - _double(a, b)))
        angle = 2.0 * math.pi * _double(c, d)
        odd = index[i] & np.uint64(1) == np.uint64(1)
        out[i] = radius * (math.sin(angle) if odd else math.cos(angle))
