"""Rows of tokens on their way to experts and back, by CUDA kernels."""

import math
from typing import Any

import numpy as np

from mpipar.ops.cuda.arrays import CudaArrayOps

Array = Any


class CudaRowOps(CudaArrayOps):
    """Moves of rows; a token adds its rows up itself, choice after choice."""

    def gather_rows(self, x: Array, index: Array) -> Array:
        if x.dtype not in (self.dtype, self.operand_dtype) or x.ndim != 2:
            return super().gather_rows(x, index)
        x, index = self._solid(x), self._index(index)
        y = self.xp.empty((*index.shape, x.shape[1]), x.dtype)
        self.launch.by_row(
            "gather_rows", [x.dtype], index.size, x.shape[1], x, index, y
        )
        return y

    def combine_rows(
        self, rows: Array, places: Array, gates: Array | None, *, out: Array
    ) -> None:
        tokens, choices = places.shape
        rows = self._either(rows)
        gates = None if gates is None else self._compute(gates)
        self.launch.by_row(
            "combine_rows", [rows.dtype, self.dtype], tokens, out.shape[1],
            rows, np.int64(len(rows)), self._index(places), gates, choices,
            self._in_place(out),
        )  # fmt: skip

    def combine_rows_bwd(
        self,
        dy: Array,
        rows: Array,
        tokens: Array,
        slots: Array,
        gates: Array,
        *,
        dgates: Array,
    ) -> Array:
        dy, rows = self._either(dy), self._either(rows)
        drows, types = self.empty_operand(rows.shape), [dy.dtype, rows.dtype]
        self.launch.by_row(
            "combine_bwd", [*types, self.dtype, self.operand_dtype],
            math.prod(rows.shape[:-1]), rows.shape[-1],
            dy, rows, self._index(tokens), self._index(slots), self._compute(gates),
            gates.shape[1], self._in_place(dgates), drows,
        )  # fmt: skip
        return drows
