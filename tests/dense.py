"""Attention over whole score arrays, and ways to count what attention by tiles does."""

import ctypes
from typing import Any

import numpy as np

from mpipar.ops.blas import gemm_address

Array = np.ndarray

# Query heads and key/value heads
HEADS = {"MHA": (3, 3), "GQA": (4, 2), "MQA": (3, 1)}
# cblas_dgemm: order, transposes, sizes, alpha, A, lda, B, ldb, beta, C, ldc
GEMM_ARGUMENTS = [ctypes.c_int] * 3 + [ctypes.c_int64] * 3 + [ctypes.c_double]
GEMM_ARGUMENTS += [ctypes.c_void_p, ctypes.c_int64] * 2
GEMM_ARGUMENTS += [ctypes.c_double, ctypes.c_void_p, ctypes.c_int64]


def inputs(
    s: int, n: int, g: int, *, b: int = 2, t: int = 0, h: int = 5,
    dtype: str = "float64", scale: float = 1.0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """q, k, v as the views of one fused array that layers give."""
    rng, t = np.random.default_rng(s), t or s
    fused = (scale * rng.standard_normal((b, max(s, t), n + 2 * g, h))).astype(dtype)
    q = fused[:, :s, :n] if t == s else fused[:, :s, :n].copy()
    return q, fused[:, :t, n : n + g], fused[:, :t, n + g :]


def shared(x: Array, n: int) -> Array:
    """Keys or values, once for every query head.   (b, t, g, h) → (b, n, t, h)"""
    return np.repeat(x, n // x.shape[2], axis=2).transpose(0, 2, 1, 3)


def dense(
    q: Array, k: Array, v: Array, scale: float, *,
    mask: Array | None = None, factors: Any = 1.0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """o, log-sum-exp, probabilities: plain softmax over whole score arrays.

    mask      (b or 1, s, t) True where a query sees a key; None = causal, the last
              query sees all
    factors   of dropout (b, n, s, t)
    """
    q = q.astype(np.float64).transpose(0, 2, 1, 3)
    k, v = (shared(x.astype(np.float64), q.shape[1]) for x in (k, v))
    scores = scale * q @ k.swapaxes(-1, -2)
    s, t = scores.shape[-2:]
    if mask is None:
        mask = np.tri(s, t, t - s, dtype=bool)[None]
    scores = np.where(mask[:, None], scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    peak[peak == -np.inf] = 0.0
    e = np.exp(scores - peak)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (peak + np.log(total))[..., 0]
    return (factors * p @ v).transpose(0, 2, 1, 3), lse, p


def dense_grads(
    do: Array, q: Array, k: Array, v: Array, scale: float, *,
    mask: Array | None = None, factors: Any = 1.0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dq, dk, dv of `dense` by the rules of calculus."""
    n, g = q.shape[2], k.shape[2]
    plain = dense(q, k, v, scale, mask=mask)[2]
    p = factors * plain
    do, q = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (do, q))
    k, v = (shared(x.astype(np.float64), n) for x in (k, v))
    dp = factors * (do @ v.swapaxes(-1, -2))
    ds = plain * (dp - (dp * plain).sum(-1, keepdims=True))

    def summed(x: Array) -> Array:
        b, _, t, h = x.shape
        return x.reshape(b, g, n // g, t, h).sum(2).transpose(0, 2, 1, 3)

    dq = (scale * ds @ k).transpose(0, 2, 1, 3)
    return dq, summed(scale * ds.swapaxes(-1, -2) @ q), summed(p.swapaxes(-1, -2) @ do)


def backward(
    ops: Any, do: Array, q: Array, k: Array, v: Array, *forward: Array, **options: Any
) -> tuple[Array, Array, Array]:
    """dq, dk, dv: what `attention_bwd` adds to arrays that are not zero before."""
    grads = [np.full(x.shape, 7.0, x.dtype) for x in (q, k, v)]
    if q.shape[1] == k.shape[1]:
        # Views of one fused array, as layers give
        n, g = q.shape[2], k.shape[2]
        fused = np.full((*q.shape[:2], n + 2 * g, q.shape[3]), 7.0, q.dtype)
        grads = [fused[:, :, :n], fused[:, :, n : n + g], fused[:, :, n + g :]]
    named = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    ops.attention_bwd(do, q, k, v, *forward, **named, **options)
    for x in grads:
        x -= 7.0
    return tuple(grads)


class Counting:
    """NumPy, but it adds up the multiply-adds of its matrix products."""

    def __init__(self) -> None:
        self.products, self.flops = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def matmul(self, a: Array, b: Array, **options: Any) -> Array:
        """The product, counted."""
        out = np.matmul(a, b, **options)
        self.products += 1
        self.flops += 2 * out.size * a.shape[-1]
        return out


def count_gemm(ops: Any) -> list[int]:
    """From now on, the multiply-adds × 2 of each product of `NumpyOps` in float64."""
    products: list[int] = []
    gemm = ctypes.CFUNCTYPE(None, *GEMM_ARGUMENTS)
    true = gemm(gemm_address("float64"))

    @gemm
    def counted(*arguments: Any) -> None:
        products.append(2 * arguments[3] * arguments[4] * arguments[5])
        true(*arguments)

    ops._gemm = ctypes.cast(counted, ctypes.c_void_p).value
    ops.counted = counted  # lives as long as its address is used
    return products
