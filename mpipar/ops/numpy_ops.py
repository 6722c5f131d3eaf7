"""NumPy ops: the reference with passes over large arrays done in place, by row blocks
that stay in the L2 cache. Same signatures, same results up to rounding.
"""

import ctypes
import math
import sys
from collections.abc import Iterator

import numpy as np

from mpipar.ops.base import GELU_TANH_CUBIC, GELU_TANH_SCALE, Ops

_CACHE_BYTES = 640 * 1024


def keep_freed_memory() -> None:
    """Tell glibc to keep freed arrays: fresh pages cost a zeroing on every step.

    Raises malloc's thresholds M_MMAP_THRESHOLD (-3) and M_TRIM_THRESHOLD (-1); nothing
    happens where the C library has no mallopt.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(ctypes.c_int(-3), ctypes.c_int(1 << 30))
    mallopt(ctypes.c_int(-1), ctypes.c_int(2**31 - 1))


class NumpyOps(Ops):
    """Fast CPU ops in the compute type `dtype`, float32 or float64."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(np, dtype)
        keep_freed_memory()
        self._ones = np.ones(1024, self.dtype)

    def ones(self, size: int) -> np.ndarray:
        """A vector of ones, to sum rows and columns by the matrix product."""
        if self._ones.size < size:
            self._ones = np.ones(size, self.dtype)
        return self._ones[:size]

    def row_sum(self, x: np.ndarray) -> np.ndarray:
        if not x.flags.c_contiguous:
            return super().row_sum(x)
        sums = x.reshape(-1, x.shape[-1]) @ self.ones(x.shape[-1])
        return sums.reshape(*x.shape[:-1], 1)

    def _row_blocks(self, rows: int, width: int, arrays: int) -> Iterator[slice]:
        """Row slices such that `arrays` blocks of that width fit in the cache."""
        size = max(8, _CACHE_BYTES // max(1, width * arrays * self.dtype.itemsize))
        for lo in range(0, rows, size):
            yield slice(lo, min(lo + size, rows))

    def _column_sum(self, x: np.ndarray, out: np.ndarray) -> None:
        """out += Σ_rows x"""
        out += self.ones(x.shape[0]) @ x

    def linear_fwd(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None
    ) -> np.ndarray:
        y = np.matmul(x.reshape(-1, x.shape[-1]), w.T)
        if b is not None:
            for rows in self._row_blocks(*y.shape, 1):
                y[rows] += b
        return y.reshape(*x.shape[:-1], w.shape[0])

    def linear_db(self, dy: np.ndarray, db: np.ndarray) -> None:
        self._column_sum(dy.reshape(-1, dy.shape[-1]), db)

    def gelu_fwd(self, x: np.ndarray, *, tanh: bool) -> tuple[np.ndarray, np.ndarray]:
        if not tanh:
            return super().gelu_fwd(x, tanh=tanh)
        flat = x.reshape(-1, x.shape[-1])
        y, slope = np.empty_like(flat), np.empty_like(flat)
        # x Φ(x) = x σ(2z) with 2z = x (a + c x²); slope = σ + y (1 − σ)(a + 3c x²)
        a, c = 2.0 * GELU_TANH_SCALE, 2.0 * GELU_TANH_SCALE * GELU_TANH_CUBIC
        for rows in self._row_blocks(*flat.shape, 5):
            u, g, d = flat[rows], y[rows], slope[rows]
            square = np.multiply(u, u, out=self.scratch("gelu square", u.shape))
            sigma = np.multiply(square, -c, out=self.scratch("gelu sigma", u.shape))
            sigma -= a
            sigma *= u
            with np.errstate(over="ignore"):
                np.exp(sigma, out=sigma)
            sigma += 1.0
            np.reciprocal(sigma, out=sigma)
            np.multiply(u, sigma, out=g)
            square *= 3.0 * c
            square += a
            square *= g
            np.subtract(1.0, sigma, out=d)
            d *= square
            d += sigma
        return y.reshape(x.shape), slope.reshape(x.shape)

    def swiglu_fwd(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        y = np.empty(gate.shape, gate.dtype)
        g2, u2, y2 = (_as_rows(a) for a in (gate, up, y))
        for rows in self._row_blocks(*y2.shape, 3):
            out = y2[rows]
            _sigmoid(g2[rows], out)
            out *= g2[rows]
            out *= u2[rows]
        return y

    def swiglu_dx(
        self,
        dy: np.ndarray,
        gate: np.ndarray,
        up: np.ndarray,
        *,
        dgate: np.ndarray,
        dup: np.ndarray,
    ) -> None:
        views = (_as_rows(a) for a in (dy, gate, up, dgate, dup))
        d, g, u, dg, du = views
        for rows in self._row_blocks(*d.shape, 6):
            sigma = self.scratch("swiglu sigma", d[rows].shape)
            _sigmoid(g[rows], sigma)
            np.multiply(d[rows], sigma, out=du[rows])
            # dgate = dy·up·σ(1 + gate(1−σ));  dup = dy·σ·gate
            np.subtract(1.0, sigma, out=sigma)
            sigma *= g[rows]
            sigma += 1.0
            sigma *= u[rows]
            np.multiply(du[rows], sigma, out=dg[rows])
            du[rows] *= g[rows]

    def layernorm_fwd(
        self, x: np.ndarray, gain: np.ndarray, bias: np.ndarray, *, eps: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        flat = x.reshape(-1, x.shape[-1])
        y = np.empty_like(flat)
        mean, rstd = (np.empty(flat.shape[0], self.dtype) for _ in range(2))
        one, share = self.ones(flat.shape[1]), 1.0 / flat.shape[1]
        for rows in self._row_blocks(*flat.shape, 3):
            h, m, r = y[rows], mean[rows], rstd[rows]
            np.matmul(flat[rows], one, out=m)
            m *= share
            np.subtract(flat[rows], m[:, None], out=h)
            _inverse_root(h, share, eps, r)
            h *= r[:, None]
            h *= gain
            h += bias
        return (
            y.reshape(x.shape),
            mean.reshape(x.shape[:-1]),
            rstd.reshape(x.shape[:-1]),
        )

    def layernorm_bwd(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        mean: np.ndarray,
        rstd: np.ndarray,
        gain: np.ndarray,
        *,
        dgain: np.ndarray,
        dbias: np.ndarray,
    ) -> np.ndarray:
        width = x.shape[-1]
        flat, grad = x.reshape(-1, width), dy.reshape(-1, width)
        mean, rstd = mean.reshape(-1, 1), rstd.reshape(-1, 1)
        dx = np.empty_like(flat)
        one, share = self.ones(width), 1.0 / width
        for rows in self._row_blocks(*flat.shape, 5):
            hat = np.subtract(
                flat[rows], mean[rows], out=self.scratch("norm hat", dx[rows].shape)
            )
            hat *= rstd[rows]
            d = np.multiply(grad[rows], hat, out=dx[rows])
            self._column_sum(d, dgain)
            self._column_sum(grad[rows], dbias)
            np.multiply(grad[rows], gain, out=d)
            c1 = (d @ one) * share
            hat *= (np.vecdot(d, hat) * share)[:, None]
            d -= hat
            d -= c1[:, None]
            d *= rstd[rows]
        return dx.reshape(x.shape)

    def rmsnorm_fwd(
        self, x: np.ndarray, gain: np.ndarray, *, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        flat = x.reshape(-1, x.shape[-1])
        y, rstd = np.empty_like(flat), np.empty(flat.shape[0], self.dtype)
        for rows in self._row_blocks(*flat.shape, 2):
            _inverse_root(flat[rows], 1.0 / flat.shape[1], eps, rstd[rows])
            np.multiply(flat[rows], rstd[rows, None], out=y[rows])
            y[rows] *= gain
        return y.reshape(x.shape), rstd.reshape(x.shape[:-1])

    def rmsnorm_bwd(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        rstd: np.ndarray,
        gain: np.ndarray,
        *,
        dgain: np.ndarray,
    ) -> np.ndarray:
        width = x.shape[-1]
        flat, grad, rstd = (
            x.reshape(-1, width),
            dy.reshape(-1, width),
            rstd.reshape(-1, 1),
        )
        dx = np.empty_like(flat)
        for rows in self._row_blocks(*flat.shape, 5):
            hat = np.multiply(
                flat[rows], rstd[rows], out=self.scratch("norm hat", dx[rows].shape)
            )
            d = np.multiply(grad[rows], hat, out=dx[rows])
            self._column_sum(d, dgain)
            np.multiply(grad[rows], gain, out=d)
            hat *= (np.vecdot(d, hat) * (1.0 / width))[:, None]
            d -= hat
            d *= rstd[rows]
        return dx.reshape(x.shape)

    def xent_fwd(
        self, logits: np.ndarray, local: np.ndarray, peak: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        total, target = np.empty_like(peak), np.zeros_like(peak)
        for rows in self._row_blocks(*logits.shape, 1):
            total[rows], target[rows] = super().xent_fwd(
                logits[rows], local[rows], peak[rows]
            )
        return total, target

    def adamw(
        self,
        weight: np.ndarray,
        grad: np.ndarray,
        m: np.ndarray,
        v: np.ndarray,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        step: int,
        scale: float,
    ) -> None:
        rate = lr / (1.0 - beta1**step)
        unbias = 1.0 / math.sqrt(1.0 - beta2**step)
        size = 24 * 1024
        for lo in range(0, weight.size, size):
            part = slice(lo, min(lo + size, weight.size))
            g, mp, vp, wp = grad[part], m[part], v[part], weight[part]
            t = np.multiply(g, scale * (1.0 - beta1), out=self.scratch("adam", g.shape))
            mp *= beta1
            mp += t
            np.multiply(g, scale * math.sqrt(1.0 - beta2), out=t)
            t *= t
            vp *= beta2
            vp += t
            np.sqrt(vp, out=t)
            t *= unbias
            t += eps
            np.divide(mp, t, out=t)
            t *= rate
            if decay:
                wp *= 1.0 - lr * decay
            wp -= t


def _as_rows(x: np.ndarray) -> np.ndarray:
    """A view (rows, width) of an array whose rows are evenly spaced.

    Raises ValueError where there is no such view.
    """
    return np.reshape(x, (-1, x.shape[-1]), copy=False)


def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    """out = 1/(1 + exp(−x))"""
    np.negative(x, out=out)
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += 1.0
    np.reciprocal(out, out=out)


def _inverse_root(x: np.ndarray, share: float, eps: float, out: np.ndarray) -> None:
    """out = 1/√(share · Σ x² + eps), a row at a time"""
    np.vecdot(x, x, out=out)
    out *= share
    out += eps
    np.sqrt(out, out=out)
    np.reciprocal(out, out=out)
