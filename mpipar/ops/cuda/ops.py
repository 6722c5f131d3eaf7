"""Ops whose passes between matrix products are CUDA kernels.

The array module and the compiler of kernels are given, so that tests run the same ops
and kernels on a CPU.
"""

import math
from types import ModuleType
from typing import Any

import numpy as np

from mpipar.ops.cuda.attention import CudaAttentionOps
from mpipar.ops.cuda.launch import SUM_BLOCKS, Launcher, chunks_of
from mpipar.ops.cuda.programs import Compile

Array = Any


class CudaOps(CudaAttentionOps):
    """Same signatures as the reference, same results up to rounding, and the same from
    run to run: no sum depends on the order in which blocks run.

    xp        array module;  compile  makes a module of a program (`programs.Compile`)
    dtype, half   as in `Ops`

    Without kernels of their own: matrix products, attention with dropout and its
    merging, the moves of rows to experts, rope_table, row_sum, erf. They are the
    reference's array operations.
    """

    def __init__(
        self, xp: ModuleType, compile: Compile, dtype: str, half: str | None = None
    ) -> None:
        super().__init__(xp, dtype, half)
        self.launch = Launcher(compile, self.dtype, self.operand_dtype)

    # --- types ------------------------------------------------------------------------

    def wide(self, x: Array) -> Array:
        if x.dtype == self.dtype or x.dtype != self.operand_dtype:
            return x
        x, out = self._solid(x), self.empty(x.shape)
        self.launch.over_items("cast", [x.dtype, self.dtype], x.size, x, out)
        return out

    def store(self, x: Array, out: Array) -> Array:
        if x.dtype == out.dtype:
            out[...] = x
            return out
        x, flat = self._solid(x), out
        if not out.flags.c_contiguous:
            flat = self.xp.empty(out.shape, out.dtype)
        types = [x.dtype, out.dtype]
        self.launch.over_items("cast", types, x.size, x, flat)
        if flat is not out:
            out[...] = flat
        return out

    def add_to(self, grad: Array, x: Array) -> None:
        if not grad.flags.c_contiguous:
            grad[...] = self._sum(self.xp.ascontiguousarray(grad), x)
        else:
            self._sum(grad, x)

    def _sum(self, grad: Array, x: Array) -> Array:
        types = [self.dtype, grad.dtype]
        self.launch.over_items("add_to", types, x.size, grad, self._compute(x))
        return grad

    # --- beside dense products --------------------------------------------------------

    def add_residual(self, y: Array, b: Array | None, onto: Array | None) -> Array:
        if b is None and onto is None:
            return y
        rows, step = _spaced(y)
        b = None if b is None else self._compute(b)
        onto = None if onto is None else self._compute(onto)
        width = y.shape[-1]
        self.launch.over_rows(
            "add_rows", [self.dtype], rows, width,
            y, b, onto, step,
        )  # fmt: skip
        return y

    def linear_db(self, dy: Array, db: Array) -> None:
        self.add_to(db, self._column_sum(self._solid(dy).reshape(-1, dy.shape[-1])))

    def _column_sum(self, x: Array) -> Array:
        """Σ over rows in the compute type.   (rows, width)  →  (width,)"""
        while True:
            rows, width = x.shape
            chunks, size = chunks_of(rows)
            sums = self.empty((chunks, width))
            self.launch.column_sums(x, sums, size)
            if chunks == 1:
                return sums[0]
            x = sums

    # --- activations ------------------------------------------------------------------

    def gelu_fwd(self, x: Array, *, tanh: bool) -> tuple[Array, Array]:
        x, y = self._compute(x), self.empty_operand(x.shape)
        slope = self.empty_operand(x.shape)
        types = [self.dtype, self.operand_dtype, tanh]
        self.launch.over_items("gelu_fwd", types, x.size, x, y, slope)
        return y, slope

    def gelu_dx(self, dy: Array, slope: Array) -> Array:
        dx, slope = self._over(self._in_place(dy)), self._solid(self.operand(slope))
        types = [self.dtype, self.operand_dtype]
        self.launch.over_items("gelu_bwd", types, dy.size, dy, slope, dx)
        return dx

    def swiglu_fwd(self, gate: Array, up: Array) -> Array:
        y, width = self.empty_operand(gate.shape), gate.shape[-1]
        (rows, gate_step), (_, up_step) = _spaced(gate), _spaced(up)
        self.launch.over_rows(
            "swiglu_fwd", [self.dtype, self.operand_dtype], rows, width,
            gate, up, y, gate_step, up_step,
        )  # fmt: skip
        return y

    def swiglu_dx(
        self, dy: Array, gate: Array, up: Array, *, dgate: Array, dup: Array
    ) -> None:
        rows, width, dy = _spaced(gate)[0], gate.shape[-1], self._compute(dy)
        steps = (_spaced(x)[1] for x in (gate, up, dgate, dup))
        self.launch.over_rows(
            "swiglu_bwd", [self.dtype, dgate.dtype], rows, width,
            dy, gate, up, dgate, dup, *steps,
        )  # fmt: skip

    # --- norms ------------------------------------------------------------------------

    def layernorm_fwd(
        self, x: Array, gain: Array, bias: Array, *, eps: float
    ) -> tuple[Array, Array, Array]:
        mean = self.empty(x.shape[:-1])
        y, rstd = self._norm_fwd(x, gain, self._compute(bias), mean, eps)
        return y, mean, rstd

    def rmsnorm_fwd(self, x: Array, gain: Array, *, eps: float) -> tuple[Array, Array]:
        return self._norm_fwd(x, gain, None, None, eps)

    def _norm_fwd(
        self,
        x: Array,
        gain: Array,
        bias: Array | None,
        mean: Array | None,
        eps: float,
    ) -> tuple[Array, Array]:
        x, width = self._compute(x), x.shape[-1]
        y, rstd = self.empty_operand(x.shape), self.empty(x.shape[:-1])
        self.launch.by_row(
            "norm_fwd", [self.dtype, self.operand_dtype, mean is not None],
            math.prod(x.shape[:-1]), width,
            x, self._compute(gain), bias, y, mean, rstd, float(eps), kept=width,
        )  # fmt: skip
        return y, rstd

    def layernorm_bwd(
        self,
        dy: Array,
        x: Array,
        mean: Array,
        rstd: Array,
        gain: Array,
        *,
        dgain: Array,
        dbias: Array,
        onto: Array | None = None,
    ) -> Array:
        return self._norm_bwd(dy, x, mean, rstd, gain, onto, [dgain, dbias])

    def rmsnorm_bwd(
        self,
        dy: Array,
        x: Array,
        rstd: Array,
        gain: Array,
        *,
        dgain: Array,
        onto: Array | None = None,
    ) -> Array:
        return self._norm_bwd(dy, x, None, rstd, gain, onto, [dgain])

    def _norm_bwd(
        self,
        dy: Array,
        x: Array,
        mean: Array | None,
        rstd: Array,
        gain: Array,
        onto: Array | None,
        grads: list[Array],
    ) -> Array:
        """dx; adds to grads: those of the gain and, with a mean, of the bias."""
        dx, width = self.empty(x.shape), x.shape[-1]
        rows = math.prod(x.shape[:-1])
        blocks = min(SUM_BLOCKS, rows)
        sums = self.empty((len(grads), blocks, width))
        dbiases = None if mean is None else sums[1]
        onto = None if onto is None else self._compute(onto)
        self.launch.by_row(
            "norm_bwd", [self.dtype, mean is not None], blocks, width,
            np.int64(rows), self._compute(dy), self._compute(x), mean, rstd,
            self._compute(gain), onto, dx, sums[0], dbiases, kept=2 * width,
        )  # fmt: skip
        for grad, parts in zip(grads, sums, strict=True):
            self.add_to(grad, self._column_sum(parts))
        return dx

    # --- positions and embedding ------------------------------------------------------

    def rope(self, x: Array, cos: Array, sin: Array, *, inverse: bool = False) -> None:
        b, s, n, h = x.shape
        if h > 1 and x.strides[-1] != x.itemsize:
            raise ValueError("the items of a head to be rotated have gaps")
        strides = (np.int64(step // x.itemsize) for step in x.strides[:3])
        self.launch.by_row(
            "rope", [self.dtype], b * s, n * h // 2,
            x, self._compute(cos), self._compute(sin), s, h // 2, *strides,
            -1.0 if inverse else 1.0,
        )  # fmt: skip

    def embedding_fwd(self, ids: Array, table: Array, *, first: int = 0) -> Array:
        width = table.shape[1]
        y = self.empty((*ids.shape, width))
        self.launch.by_row(
            "embedding_fwd", [table.dtype, self.dtype], ids.size, width,
            self._index(ids), self._solid(table), y, np.int64(first),
            np.int64(len(table)),
        )  # fmt: skip
        return y

    def embedding_dw(
        self, dy: Array, ids: Array, dtable: Array, *, first: int = 0
    ) -> None:
        flat, width = self._index(ids).reshape(-1), dtable.shape[1]
        order = self._index(self.xp.argsort(flat, kind="stable"))
        self.launch.by_row(
            "embedding_bwd", [self.dtype, dtable.dtype], ids.size, width,
            self._compute(dy), flat, order, dtable, np.int64(first),
            np.int64(len(dtable)), np.int64(ids.size),
        )  # fmt: skip

    def add_positions(self, x: Array, table: Array, rows: Array) -> None:
        b, s, width = x.shape
        self.launch.by_row(
            "add_positions", [self.dtype, table.dtype], b * s, width,
            self._in_place(x), self._solid(table), self._index(rows), s,
        )  # fmt: skip

    def positions_dw(self, dy: Array, rows: Array, dtable: Array) -> None:
        b, s, width = dy.shape
        self.launch.by_row(
            "positions_bwd", [self.dtype, dtable.dtype], s, width,
            self._compute(dy), self._index(rows), dtable, b, s,
        )  # fmt: skip

    # --- random numbers ---------------------------------------------------------------

    def dropout_scale(
        self,
        rate: float,
        width: int,
        rows: tuple[Array, Array, Array],
        key: tuple[int, int],
        *,
        start: int = 0,
    ) -> Array:
        xp, low = self.xp, 0xFFFFFFFF
        words = xp.broadcast_arrays(*(xp.asarray(r, dtype=xp.uint64) for r in rows))
        counters = [self._solid((w & xp.uint64(low)).astype(xp.uint32)) for w in words]
        out = self.empty((*words[0].shape, width))
        limit = math.ceil(float(np.float32(rate)) * 2**24)
        groups = (start + width + 3) // 4 - start // 4
        self.launch.over_items(
            "dropout_factors", [self.dtype], words[0].size * groups,
            *counters, out, width,
            *(np.int64(number) for number in (start, groups, *key, limit)),
            1.0 / (1.0 - rate),
        )  # fmt: skip
        return out

    # --- loss and optimizer -----------------------------------------------------------

    def row_max(self, logits: Array) -> Array:
        peak, width = self.empty(logits.shape[:-1]), logits.shape[-1]
        logits = self._compute(logits)
        self.launch.by_row("row_max", [self.dtype], peak.size, width, logits, peak)
        return peak

    def xent_fwd(self, logits: Array, local: Array, peak: Array) -> tuple[Array, Array]:
        total, target = self.empty(peak.shape), self.empty(peak.shape)
        rows, width = logits.shape
        self.launch.by_row(
            "xent_fwd", [self.dtype], rows, width,
            self._in_place(logits), self._index(local), self._compute(peak), total,
            target,
        )  # fmt: skip
        return total, target

    def xent_dx(self, e: Array, total: Array, local: Array, seed: Array) -> Array:
        dlogits, (rows, width) = self._over(self._in_place(e)), e.shape
        self.launch.by_row(
            "xent_bwd", [self.dtype, self.operand_dtype], rows, width,
            e, self._compute(total), self._index(local), self._compute(seed), dlogits,
        )  # fmt: skip
        return dlogits

    def square_sum(self, x: Array) -> float:
        sums = self.xp.zeros(SUM_BLOCKS)
        self.launch.over_items(
            "square_sums", [x.dtype], x.size, x, sums, blocks=SUM_BLOCKS
        )
        return float(self.to_host(sums).sum())

    def adamw(
        self,
        weight: Array,
        grad: Array,
        m: Array,
        v: Array,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        step: int,
        scale: float,
    ) -> None:
        numbers = (
            lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step),
            beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, 1.0 - lr * decay, scale,
        )  # fmt: skip
        self.launch.over_items(
            "adamw", [self.dtype, grad.dtype], weight.size,
            weight, grad, m, v, *(float(number) for number in numbers),
        )  # fmt: skip

    # --- arrays -----------------------------------------------------------------------

    def _solid(self, x: Array) -> Array:
        """x without gaps, as most kernels take it; a copy only where it has some."""
        return self.xp.ascontiguousarray(x)

    def _compute(self, x: Array) -> Array:
        """x in the compute type without gaps.   Raises TypeError for a third type"""
        x = self._solid(self.wide(x))
        if x.dtype != self.dtype:
            raise TypeError(f"an array of {x.dtype} where kernels take {self.dtype}")
        return x

    def _in_place(self, x: Array, *types: np.dtype) -> Array:
        """x, to be written; of the compute type unless others are given.

        Raises ValueError where it has gaps, TypeError where it has another type.
        """
        if not x.flags.c_contiguous:
            raise ValueError(f"an array of {x.shape} items to be written has gaps")
        if x.dtype not in (types or (self.dtype,)):
            raise TypeError(f"an array of {x.dtype} to be written in place")
        return x

    def _index(self, x: Array) -> Array:
        """Indices as kernels take them, on this device."""
        return self.xp.ascontiguousarray(self.xp.asarray(x), dtype=np.int64)

    def _over(self, x: Array) -> Array:
        """Where an operand made from x goes: over x itself if of its type."""
        return x if x.dtype == self.operand_dtype else self.empty_operand(x.shape)


def _spaced(x: Array) -> tuple[int, np.int64]:
    """How many rows an array has, and how many items lie from one to the next.

    Raises ValueError where rows are not evenly spaced, or items not side by side.
    """
    rows, step = 1, x.shape[-1]
    even = x.shape[-1] == 1 or x.strides[-1] == x.itemsize
    for size, stride in zip(x.shape[-2::-1], x.strides[-2::-1], strict=True):
        if size == 1:
            continue
        if rows == 1:
            step = stride // x.itemsize
        even &= stride == rows * step * x.itemsize
        rows *= size
    if not even:
        raise ValueError(f"rows of {x.shape} items with strides {x.strides} are uneven")
    return rows, np.int64(step)
