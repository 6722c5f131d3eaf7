"""Biases, residual sums, activations, rotations, and sums over tokens.

Rows lo .. hi are worked on, so that threads can share an array. x (T, w) means T tokens
of width w; nothing here allocates.
"""

import math

from mpipar.ops.kernels.compile import kernel
from mpipar.ops.kernels.intrinsics import exp, narrow, real, widen


@kernel("(T[:, ::1], T[:, ::1], T[::1], i8, i8)")
def add_rows(out, x, bias, lo, hi):
    """out += x + bias"""
    for i in range(lo, hi):
        for j in range(out.shape[1]):
            out[i, j] += x[i, j] + bias[j]


@kernel("(O[:, ::1], T[::1], i8, i8)")
def column_sum(x, out, lo, hi):
    """out += Σ_rows x"""
    for i in range(lo, hi):
        for j in range(out.size):
            out[j] += widen(x[i, j], out[j])


@kernel("(T[::1], O[::1], i8, i8)")
def to_operand(x, out, lo, hi):
    """out = x in the operand type"""
    xs, outs = x[lo:hi], out[lo:hi]
    for i in range(xs.size):
        outs[i] = narrow(xs[i], outs[i])


@kernel("(T[:, ::1], O[:, ::1], O[:, ::1], i8, i8)")
def gelu_tanh(x, y, slope, lo, hi):
    """y = x σ(2z), 2z = x (a + c x²), and dy/dx = σ + y (1 − σ)(a + 3c x²)"""
    like = x[0, 0]
    one = real(1.0, like)
    a = real(2.0 * math.sqrt(2.0 / math.pi), like)
    c = real(2.0 * math.sqrt(2.0 / math.pi) * 0.044715, like)
    c3 = real(3.0, like) * c
    for i in range(lo, hi):
        for j in range(x.shape[1]):
            u = x[i, j]
            square = u * u
            sigma = one / (one + exp(-u * (a + c * square)))
            g = u * sigma
            y[i, j] = narrow(g, y[i, j])
            d = sigma + g * (one - sigma) * (a + c3 * square)
            slope[i, j] = narrow(d, slope[i, j])


@kernel("(T[:, ::1], O[:, ::1], O[:, ::1], i8, i8)")
def gelu_erf(x, y, slope, lo, hi):
    """y = x Φ(x), and dy/dx = Φ + x φ"""
    like = x[0, 0]
    half = real(0.5, like)
    root, density = real(math.sqrt(0.5), like), real(math.sqrt(0.5 / math.pi), like)
    for i in range(lo, hi):
        for j in range(x.shape[1]):
            u = x[i, j]
            phi = half + half * real(math.erf(u * root), like)
            y[i, j] = narrow(u * phi, y[i, j])
            d = phi + u * density * exp(-half * u * u)
            slope[i, j] = narrow(d, slope[i, j])


@kernel("(T[:, ::1], O[:, ::1], O[:, ::1], i8, i8)")
def multiply(dy, slope, dx, lo, hi):
    """dx = dy · slope"""
    for i in range(lo, hi):
        for j in range(dy.shape[1]):
            dx[i, j] = narrow(dy[i, j] * widen(slope[i, j], dy[i, j]), dx[i, j])


@kernel("(T[:, :], T[:, :], O[:, ::1], i8, i8)")
def swiglu(gate, up, y, lo, hi):
    """y = gate σ(gate) · up"""
    one = real(1.0, gate[0, 0])
    for i in range(lo, hi):
        for j in range(y.shape[1]):
            g = gate[i, j]
            y[i, j] = narrow(g / (one + exp(-g)) * up[i, j], y[i, j])


@kernel("(T[:, ::1], T[:, :], T[:, :], O[:, :], O[:, :], i8, i8)")
def swiglu_back(dy, gate, up, dgate, dup, lo, hi):
    """dgate = dy·up·σ(1 + gate(1−σ)), dup = dy·gate·σ"""
    one = real(1.0, dy[0, 0])
    for i in range(lo, hi):
        for j in range(dy.shape[1]):
            g = gate[i, j]
            sigma = one / (one + exp(-g))
            d = dy[i, j] * sigma
            dup[i, j] = narrow(d * g, dup[i, j])
            d *= up[i, j] * (one + g * (one - sigma))
            dgate[i, j] = narrow(d, dgate[i, j])


@kernel("(T[:, :, :, :], T[:, ::1], T[:, ::1], T, i8, i8)")
def rotate(x, cos, sin, sign, lo, hi):
    """(x₁, x₂) → (x₁c − x₂s, x₂c + x₁s) of sequences lo .. hi; sign −1 turns back"""
    half = cos.shape[1]
    for b in range(lo, hi):
        for s in range(x.shape[1]):
            for n in range(x.shape[2]):
                row = x[b, s, n]
                for j in range(half):
                    first, second = row[j], row[half + j]
                    turn = sign * sin[s, j]
                    row[j] = first * cos[s, j] - second * turn
                    row[half + j] = second * cos[s, j] + first * turn


@kernel("(T[:, ::1], i8[::1], T[:, ::1])")
def scatter_add(rows, index, table):
    """table[index] += rows in token order; an index outside of the table is skipped"""
    for i in range(index.size):
        k = index[i]
        if 0 <= k < table.shape[0]:
            for j in range(table.shape[1]):
                table[k, j] += rows[i, j]
