"""Attention by CUDA kernels."""

from typing import Any

import numpy as np

from mpipar.ops.attention import DropoutTile
from mpipar.ops.cuda.arrays import CudaArrayOps
from mpipar.ops.cuda.launch import ATTENTION_ROWS, WARP

Array = Any


class CudaAttentionOps(CudaArrayOps):
    """Attention of `Ops` by kernels in the compute type; with dropout factors, it is
    the reference's array operations."""

    def attention_fwd(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        spans: np.ndarray,
        dropout: DropoutTile | None = None,
        part: bool = False,
    ) -> tuple[Array, Array]:
        if dropout is not None:
            return super().attention_fwd(
                q, k, v, scale=scale, spans=spans, dropout=dropout, part=part
            )
        b, s, n, h = q.shape
        o = self.empty(q.shape) if part else self.empty_operand(q.shape)
        lse = self.empty((b, n, s))
        begin, end, _, step = self._spans(spans)
        self.launch.by_warps(
            "attention_fwd", [self.dtype, o.dtype], (s, n, b), self._kept(2, h),
            h, q, k, v, o, lse, begin, end, step, s, n // k.shape[2], float(scale),
            *self._steps(q, k, v),
        )  # fmt: skip
        return o, lse

    def attention_bwd(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        *,
        dq: Array,
        dk: Array,
        dv: Array,
        scale: float,
        spans: np.ndarray,
        dropout: DropoutTile | None = None,
    ) -> None:
        if dropout is not None:
            super().attention_bwd(
                do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, scale=scale, spans=spans,
                dropout=dropout,
            )  # fmt: skip
            return
        (b, s, n, h), (_, t, g, _) = q.shape, k.shape
        do, o, lse = (self.xp.ascontiguousarray(x) for x in (do, o, lse))
        delta = self.empty(lse.shape)
        spans, scale = self._spans(spans), float(scale)
        self.launch.by_warps(
            "attention_bwd_q", [self.dtype, o.dtype], (s, n, b), self._kept(3, h),
            h, do, q, k, v, o, lse, delta, dq, *spans, s, n // g, scale,
            *self._steps(q, k, v, dq),
        )  # fmt: skip
        self.launch.by_warps(
            "attention_bwd_kv", [self.dtype], (t, g, b), self._kept(4, h),
            h, do, q, k, v, lse, delta, dk, dv, *spans, s, t, n // g, scale,
            *self._steps(q, k, v, dk, dv),
        )  # fmt: skip

    def _kept(self, rows: int, h: int) -> int:
        """Items of two tiles, and of so many rows of each warp."""
        return 2 * WARP * (h + 1) + rows * ATTENTION_ROWS * h

    def _spans(self, spans: np.ndarray) -> tuple[Array, Array, Array, np.int64]:
        """Begins, ends and counts on the device, and items from a sequence's to the
        next one's."""
        begin, end, count = self.xp.asarray(np.ascontiguousarray(spans, np.int64))
        step = begin.shape[1] if len(begin) > 1 else 0
        return begin, end, count, np.int64(step)

    def _steps(self, *heads: Array) -> list[np.int64]:
        """Items from one sequence, place and head to the next, of each array.

        Raises TypeError for another type than the compute type, ValueError where the
        items of a head have gaps.
        """
        if any(x.dtype != self.dtype for x in heads):
            raise TypeError(f"heads are to be of {self.dtype}")
        if any(x.shape[-1] > 1 and x.strides[-1] != x.itemsize for x in heads):
            raise ValueError("the items of a head have gaps")
        return [np.int64(step // x.itemsize) for x in heads for step in x.strides[:3]]
