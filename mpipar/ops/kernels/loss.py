"""Cross-entropy, a row of logits at a time."""

from mpipar.ops.kernels.compile import kernel
from mpipar.ops.kernels.intrinsics import exp, larger, narrow, real


@kernel("(T[:, ::1], T[::1], i8, i8)")
def row_max(logits, peak, lo, hi):
    """peak = max over each row"""
    for i in range(lo, hi):
        top = logits[i, 0]
        for j in range(logits.shape[1]):
            top = larger(top, logits[i, j])
        peak[i] = top


@kernel("(T[:, ::1], i8[::1], T[::1], T[::1], T[::1], i8, i8)")
def exponentials(logits, local, peak, total, target, lo, hi):
    """logits ← exp(logits − peak), their sums, and logit[local] − peak where held"""
    zero = real(0.0, peak[0])
    for i in range(lo, hi):
        k = local[i]
        target[i] = zero
        if 0 <= k < logits.shape[1]:
            target[i] = logits[i, k] - peak[i]
        mass = zero
        for j in range(logits.shape[1]):
            e = exp(logits[i, j] - peak[i])
            logits[i, j] = e
            mass += e
        total[i] = mass


@kernel("(T[:, ::1], T[::1], i8[::1], T[::1], O[:, ::1], i8, i8)")
def softmax_back(e, total, local, seed, out, lo, hi):
    """out = seed·(e/total − onehot); out may be e"""
    for i in range(lo, hi):
        factor = seed[i] / total[i]
        k = local[i]
        held = 0 <= k < e.shape[1]
        share = e[i, k if held else 0] * factor
        for j in range(e.shape[1]):
            out[i, j] = narrow(e[i, j] * factor, out[i, j])
        if held:
            out[i, k] = narrow(share - seed[i], out[i, k])
