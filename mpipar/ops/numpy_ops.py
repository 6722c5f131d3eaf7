"""CPU ops: everything in one fused pass by a kernel; products by one of our own where
the CPU has AVX-512, else by NumPy's BLAS.

Same signatures as the reference, same results up to rounding. Threads share rows, so
that BLAS itself needs no threads.
"""

from typing import Any

import numpy as np

from mpipar.ops import blas
from mpipar.ops.attention import Draws
from mpipar.ops.blas import gemm_address
from mpipar.ops.kernels import (
    attention,
    elementwise,
    norm,
    product,
    random,
)  # fmt: skip
from mpipar.ops.kernels.tile import has_registers
from mpipar.ops.loss_kernels import LossKernelOps
from mpipar.ops.philox import drop_limit
from mpipar.ops.runner import as_bits, optional, rows_of, spaced_rows
from mpipar.ops.team import MULTIPLY_ADDS


class NumpyOps(LossKernelOps):
    """Fast CPU ops in the compute type `dtype`, float32 or float64.

    threads   that share each operation
    half      as in `Ops`, for a subclass that multiplies such operands
    """

    def __init__(
        self, dtype: str = "float32", threads: int = 1, half: str | None = None
    ) -> None:
        super().__init__(dtype, threads, half)
        self._gemm = gemm_address(self.dtype.name)

    # --- dense products ---------------------------------------------------------------

    def linear_fwd(
        self,
        x: np.ndarray,
        w: np.ndarray,
        b: np.ndarray | None = None,
        onto: np.ndarray | None = None,
        *,
        narrow: bool = False,
    ) -> np.ndarray:
        y = np.empty((*x.shape[:-1], w.shape[0]), self.dtype)
        rows, out = rows_of(x), rows_of(y)
        base = None if onto is None else rows_of(onto)
        b = None if b is None else self.wide(b)

        def work(lo: int, hi: int, thread: int) -> None:
            part = None if base is None else base[lo:hi]
            self._multiply(rows[lo:hi], w.T, out[lo:hi], thread, bias=b, onto=part)

        self.team.share(len(out), work, y.size * w.shape[1] // MULTIPLY_ADDS)
        return self.operand(y) if narrow else y

    def linear_dx(
        self, dy: np.ndarray, w: np.ndarray, *, narrow: bool = False
    ) -> np.ndarray:
        dx = np.empty((*dy.shape[:-1], w.shape[1]), self.dtype)
        rows, out = rows_of(dy), rows_of(dx)
        self.team.share(
            len(out),
            lambda lo, hi, t: self._multiply(rows[lo:hi], w, out[lo:hi], t),
            dx.size * w.shape[0] // MULTIPLY_ADDS,
        )
        return self.operand(dx) if narrow else dx

    def linear_dw(self, dy: np.ndarray, x: np.ndarray, dw: np.ndarray) -> None:
        grad, rows = rows_of(dy), rows_of(x)

        def work(lo: int, hi: int, thread: int) -> None:
            part = dw[lo:hi]
            self._multiply(grad[:, lo:hi].T, rows, part, thread, onto=part)

        self.team.share(len(dw), work, dw.size * len(rows) // MULTIPLY_ADDS)

    def _multiply(
        self,
        a: np.ndarray,
        b: np.ndarray,
        out: np.ndarray,
        thread: int,
        *,
        bias: np.ndarray | None = None,
        onto: np.ndarray | None = None,
    ) -> None:
        """out = a b + bias + onto, which may be out; one thread of the team does it."""
        if len(a) < product.STRIP or not (a.size and has_registers()):
            blas.multiply(a, b, out, bias=bias, onto=onto)
            return
        size = product.SCRATCH // self.dtype.itemsize
        scratch = self.scratch("factors", (self.team.size, size))[thread]
        biased, added = bias is not None, onto is not None
        product.multiply(
            a, b, bias if biased else out[0], biased, onto if added else out, added,
            out, scratch,
        )  # fmt: skip

    def linear_db(self, dy: np.ndarray, db: np.ndarray) -> None:
        self._summed(elementwise.column_sum, rows_of(dy), sums=[db])

    def add_residual(
        self, y: np.ndarray, b: np.ndarray | None, onto: np.ndarray | None
    ) -> np.ndarray:
        if b is None or onto is None:
            return super().add_residual(y, b, onto)
        self._by_rows(elementwise.add_rows, spaced_rows(y), rows_of(onto), self.wide(b))
        return y

    # --- activations ------------------------------------------------------------------

    def gelu_fwd(self, x: np.ndarray, *, tanh: bool) -> tuple[np.ndarray, np.ndarray]:
        y, slope = self.empty_operand(x.shape), self.empty_operand(x.shape)
        kernel = elementwise.gelu_tanh if tanh else elementwise.gelu_erf
        self._by_rows(kernel, rows_of(x), rows_of(y), rows_of(slope))
        return y, slope

    def gelu_dx(self, dy: np.ndarray, slope: np.ndarray) -> np.ndarray:
        dx = self._over(dy)
        views = rows_of(dy), rows_of(slope), spaced_rows(dx)
        self._by_rows(elementwise.multiply, *views)
        return dx

    def swiglu_fwd(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        y = self.empty_operand(gate.shape)
        self._by_rows(
            elementwise.swiglu, spaced_rows(gate), spaced_rows(up), rows_of(y)
        )
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
        views = (spaced_rows(a) for a in (gate, up, dgate, dup))
        self._by_rows(elementwise.swiglu_back, rows_of(dy), *views)

    # --- norms ------------------------------------------------------------------------

    def layernorm_fwd(
        self, x: np.ndarray, gain: np.ndarray, bias: np.ndarray, *, eps: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        y = self.empty_operand(x.shape)
        mean, rstd = (np.empty(x.shape[:-1], self.dtype) for _ in range(2))
        flat = mean.reshape(-1), rstd.reshape(-1)
        eps, gain, bias = self.dtype.type(eps), self.wide(gain), self.wide(bias)
        self._by_rows(norm.layernorm, rows_of(x), gain, bias, eps, rows_of(y), *flat)
        return y, mean, rstd

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
        onto: np.ndarray | None = None,
    ) -> np.ndarray:
        dx = np.empty(x.shape, self.dtype)
        statistics = mean.reshape(-1), rstd.reshape(-1)
        self._summed(
            norm.layernorm_back, rows_of(dy), rows_of(x), *statistics, self.wide(gain),
            sums=[dgain, dbias],
            after=(*optional(onto, dx), rows_of(dx)),
        )  # fmt: skip
        return dx

    def rmsnorm_fwd(
        self, x: np.ndarray, gain: np.ndarray, *, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        y, rstd = self.empty_operand(x.shape), np.empty(x.shape[:-1], self.dtype)
        eps, gain = self.dtype.type(eps), self.wide(gain)
        self._by_rows(norm.rmsnorm, rows_of(x), gain, eps, rows_of(y), rstd.reshape(-1))
        return y, rstd

    def rmsnorm_bwd(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        rstd: np.ndarray,
        gain: np.ndarray,
        *,
        dgain: np.ndarray,
        onto: np.ndarray | None = None,
    ) -> np.ndarray:
        dx = np.empty(x.shape, self.dtype)
        self._summed(
            norm.rmsnorm_back, rows_of(dy), rows_of(x), rstd.reshape(-1),
            self.wide(gain), sums=[dgain], after=(*optional(onto, dx), rows_of(dx)),
        )  # fmt: skip
        return dx

    # --- positions and embedding ------------------------------------------------------

    def rope(
        self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, inverse: bool = False
    ) -> None:
        sign = self.dtype.type(-1.0 if inverse else 1.0)
        self._by_rows(elementwise.rotate, x, cos, sin, sign)

    def _scatter_add(
        self, target: np.ndarray, index: np.ndarray, rows: np.ndarray
    ) -> None:
        elementwise.scatter_add(rows_of(rows), index, target)

    # --- attention --------------------------------------------------------------------

    def attention_fwd(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float,
        spans: np.ndarray,
        dropout: Draws | None = None,
        part: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        if dropout is not None or not self._rows_for_blas(q, k, v):
            return super().attention_fwd(
                q, k, v, scale=scale, spans=spans, dropout=dropout, part=part
            )
        b, s, n, h = q.shape
        o = self.empty(q.shape) if part else self.empty_operand(q.shape)
        bits, lse = as_bits(o), np.empty((b, n, s), self.dtype)
        scale = self.dtype.type(scale)
        tile = attention.QUERY_TILE
        scores = self.scratch("scores", (self.team.size, tile * attention.KEY_TILE))
        sums = self.scratch("sums", (self.team.size, tile, h + 2))
        turned = self.scratch("keys turned", (self.team.size, k.shape[1] * h))
        self.team.share(
            b * k.shape[2],
            lambda lo, hi, thread: attention.attention(
                self._gemm, q, k, v, bits, lse, scale, spans, scores[thread],
                sums[thread], turned[thread], lo, hi,
            ),
            lse.size * k.shape[1],
        )  # fmt: skip
        return o, lse

    def attention_merge(
        self, o: np.ndarray, lse: np.ndarray, part: np.ndarray, level: np.ndarray
    ) -> None:
        self.team.share(
            o.shape[0] * o.shape[1],
            lambda lo, hi, thread: attention.merge(o, lse, part, level, lo, hi),
            o.size,
        )

    def attention_bwd(
        self,
        do: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        o: np.ndarray,
        lse: np.ndarray,
        *,
        dq: np.ndarray,
        dk: np.ndarray,
        dv: np.ndarray,
        scale: float,
        spans: np.ndarray,
        dropout: Draws | None = None,
    ) -> None:
        if dropout is not None or not self._rows_for_blas(q, k, v, dq, dk, dv):
            super().attention_bwd(
                do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, scale=scale, spans=spans,
                dropout=dropout,
            )  # fmt: skip
            return
        do, o = np.ascontiguousarray(do), as_bits(np.ascontiguousarray(o))
        scale = self.dtype.type(scale)
        tile = attention.QUERY_TILE * attention.KEY_TILE
        scratch = self.scratch("score gradients", (self.team.size, 2, tile))
        size = k.shape[1] * k.shape[3]
        turned = self.scratch("keys and values turned", (self.team.size, 2, size))
        self.team.share(
            q.shape[0] * k.shape[2],
            lambda lo, hi, thread: attention.attention_back(
                self._gemm, do, q, k, v, o, lse, dq, dk, dv, scale, spans,
                scratch[thread], turned[thread], lo, hi,
            ),
            lse.size * k.shape[1],
        )  # fmt: skip

    def _rows_for_blas(self, *heads: np.ndarray) -> bool:
        """True where BLAS can read each head's rows and has a name here."""
        return self._gemm != 0 and all(x.strides[-1] == x.itemsize for x in heads)

    # --- random numbers ---------------------------------------------------------------

    def dropout_scale(
        self,
        rate: float,
        width: int,
        rows: tuple[Any, Any, Any],
        key: tuple[int, int],
        *,
        start: int = 0,
    ) -> np.ndarray:
        first, last = start // 4, (start + width + 3) // 4
        counters = np.broadcast_arrays(*(np.asarray(r, np.uint64) for r in rows))
        shape = counters[0].shape
        low = np.uint64(0xFFFFFFFF)
        counters = [np.ascontiguousarray(c & low).reshape(-1) for c in counters]
        out = np.empty((counters[0].size, 4 * (last - first)), self.dtype)
        limit = drop_limit(rate)
        fixed = [np.uint64(number) for number in (*key, first, limit)]
        factor = self.dtype.type(1.0 / (1.0 - rate))
        fill = random.dropout_factors
        self.team.share(
            len(out),
            lambda lo, hi, _: fill(*counters, *fixed, factor, out, lo, hi),
            out.size,
        )
        skip = start - 4 * first
        return out[:, skip : skip + width].reshape(*shape, width)

    def _draws(
        self,
        begin: int,
        size: int,
        rows: tuple[int, int, int],
        step: int,
        key: tuple[int, int],
    ) -> np.ndarray:
        out = np.empty(size, np.uint32)
        random.draws(begin, *rows, *map(np.uint64, (step, *key)), out, 0, size)
        return out

    def _normals(
        self, index: np.ndarray, std: float, key: tuple[int, int]
    ) -> np.ndarray:
        out = np.empty(index.size, self.dtype)
        words = (np.uint64(word) for word in key)
        self._by_rows(random.normals, index.view(np.uint64), *words, std, out)
        return out
