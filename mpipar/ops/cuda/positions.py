"""Positions, embedding and dropout by CUDA kernels."""

from typing import Any

import numpy as np

from mpipar.ops.cuda.arrays import CudaArrayOps
from mpipar.ops.philox import drop_limit

Array = Any


class CudaPositionOps(CudaArrayOps):
    """Where tokens enter: rows of tables, rotations, masks."""

    def rope(self, x: Array, cos: Array, sin: Array, *, inverse: bool = False) -> None:
        b, s, n, h = x.shape
        if h > 1 and x.strides[-1] != x.itemsize:
            raise ValueError("the items of a head to be rotated have gaps")
        if x.dtype != self.operand_dtype and x.dtype != self.dtype:
            raise TypeError(f"heads of {x.dtype} to be rotated")
        strides = (np.int64(step // x.itemsize) for step in x.strides[:3])
        self.launch.by_row(
            "rope", [x.dtype, self.dtype], b * s, n * h // 2,
            x, self._compute(cos), self._compute(sin), s, h // 2, *strides,
            -1.0 if inverse else 1.0,
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
            self._compute(dy), self._index(rows), dtable, b,
        )  # fmt: skip

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
        limit = drop_limit(rate)
        groups = (start + width + 3) // 4 - start // 4
        self.launch.over_items(
            "dropout_factors", [self.dtype], words[0].size * groups,
            *counters, out, width,
            *(np.int64(number) for number in (start, groups, *key, limit)),
            1.0 / (1.0 - rate),
        )  # fmt: skip
        return out

    def dropout(
        self,
        x: Array,
        rate: float,
        rows: tuple[Array, Array, int],
        key: tuple[int, int],
        *,
        onto: Array | None = None,
    ) -> Array:
        positions, samples, number = rows
        x, y, (b, s, width) = self._compute(x), self.empty(x.shape), x.shape
        onto = None if onto is None else self._compute(onto)
        limit = drop_limit(rate)
        self.launch.by_row(
            "dropout", [self.dtype], b * s, width,
            x, onto, y, self._index(positions), self._index(samples), s,
            *(np.int64(n) for n in (number & 0xFFFFFFFF, *key, limit)),
            1.0 / (1.0 - rate),
        )  # fmt: skip
        return y
