"""LayerNorm and RMSNorm, one row at a time, forward and backward."""

import math

from mpipar.ops.kernels.compile import kernel
from mpipar.ops.kernels.intrinsics import narrow, real


@kernel("(T[:, ::1], T[::1], T[::1], T, O[:, ::1], T[::1], T[::1], i8, i8)")
def layernorm(x, gain, bias, eps, y, mean, rstd, lo, hi):
    """y = (x − μ)·r·gain + bias"""
    width = x.shape[1]
    one, zero = real(1.0, eps), real(0.0, eps)
    share = one / real(width, eps)
    for i in range(lo, hi):
        total = zero
        for j in range(width):
            total += x[i, j]
        m = total * share
        square = zero
        for j in range(width):
            d = x[i, j] - m
            square += d * d
        r = one / math.sqrt(square * share + eps)
        mean[i] = m
        rstd[i] = r
        for j in range(width):
            y[i, j] = narrow((x[i, j] - m) * r * gain[j] + bias[j], y[i, j])


@kernel(
    "(T[:, ::1], T[:, ::1], T[::1], T[::1], T[::1], T[::1], T[::1], T[:, ::1], "
    "boolean, T[:, ::1], i8, i8)"
)
def layernorm_back(dy, x, mean, rstd, gain, dgain, dbias, onto, add, dx, lo, hi):
    """dx = r(dŷ − mean(dŷ) − x̂·mean(dŷ·x̂)) (+ onto), dŷ = dy·gain; sums dgain, dbias"""
    width = x.shape[1]
    zero = real(0.0, mean[0])
    share = real(1.0, zero) / real(width, zero)
    for i in range(lo, hi):
        m, r = mean[i], rstd[i]
        c1 = c2 = zero
        for j in range(width):
            hat = (x[i, j] - m) * r
            d = dy[i, j]
            dbias[j] += d
            dgain[j] += d * hat
            d *= gain[j]
            c1 += d
            c2 += d * hat
        c1 *= share * r
        c2 *= share * r
        if add:
            for j in range(width):
                hat = (x[i, j] - m) * r
                dx[i, j] = onto[i, j] + (dy[i, j] * gain[j] * r - c1 - hat * c2)
        else:
            for j in range(width):
                hat = (x[i, j] - m) * r
                dx[i, j] = dy[i, j] * gain[j] * r - c1 - hat * c2


@kernel("(T[:, ::1], T[::1], T, O[:, ::1], T[::1], i8, i8)")
def rmsnorm(x, gain, eps, y, rstd, lo, hi):
    """y = x·r·gain"""
    width = x.shape[1]
    one, zero = real(1.0, eps), real(0.0, eps)
    share = one / real(width, eps)
    for i in range(lo, hi):
        square = zero
        for j in range(width):
            square += x[i, j] * x[i, j]
        r = one / math.sqrt(square * share + eps)
        rstd[i] = r
        for j in range(width):
            y[i, j] = narrow(x[i, j] * r * gain[j], y[i, j])


@kernel(
    "(T[:, ::1], T[:, ::1], T[::1], T[::1], T[::1], T[:, ::1], boolean, T[:, ::1], "
    "i8, i8)"
)
def rmsnorm_back(dy, x, rstd, gain, dgain, onto, add, dx, lo, hi):
    """dx = r(dŷ − x̂·mean(dŷ·x̂)) (+ onto), dŷ = dy·gain; sums dgain"""
    width = x.shape[1]
    zero = real(0.0, rstd[0])
    share = real(1.0, zero) / real(width, zero)
    for i in range(lo, hi):
        r = rstd[i]
        c2 = zero
        for j in range(width):
            hat = x[i, j] * r
            d = dy[i, j]
            dgain[j] += d * hat
            c2 += d * gain[j] * hat
        c2 *= share * r
        if add:
            for j in range(width):
                dx[i, j] = onto[i, j] + (dy[i, j] * gain[j] * r - x[i, j] * r * c2)
        else:
            for j in range(width):
                dx[i, j] = dy[i, j] * gain[j] * r - x[i, j] * r * c2
