"""Passes over flat arrays: the squared norm and AdamW.

Loops run from 0 over slices: an index that might be negative would not vectorise.
"""

import math

from mpipar.ops.kernels.compile import kernel
from mpipar.ops.kernels.intrinsics import real, widen


@kernel("(G[::1], f8[::1], i8, i8)")
def square_sum(x, out, lo, hi):
    """out[0] += Σ x² in float64"""
    part = x[lo:hi]
    total = 0.0
    for i in range(part.size):
        number = float(widen(part[i], total))
        total += number * number
    out[0] += total


@kernel("(T[::1], G[::1], T[::1], T[::1], T[::1], i8, i8)")
def adamw(weight, grad, m, v, numbers, lo, hi):
    """One update; numbers: rate/(1−β₁ᵗ), 1/√(1−β₂ᵗ), β₁, β₂, ε, 1 − lr·decay, scale"""
    rate, unbias, beta1, beta2 = numbers[0], numbers[1], numbers[2], numbers[3]
    eps, keep, scale = numbers[4], numbers[5], numbers[6]
    one = real(1.0, rate)
    ws, gs, ms, vs = weight[lo:hi], grad[lo:hi], m[lo:hi], v[lo:hi]
    for i in range(ws.size):
        g = widen(gs[i], scale) * scale
        first = beta1 * ms[i] + (one - beta1) * g
        second = beta2 * vs[i] + (one - beta2) * g * g
        ms[i] = first
        vs[i] = second
        ws[i] = ws[i] * keep - rate * first / (math.sqrt(second) * unbias + eps)
