"""Rows of tokens on their way to experts and back, each way in one pass by a kernel."""

import numpy as np

from mpipar.ops.kernels import rows as kernels
from mpipar.ops.runner import KernelOps, rows_of


class RowKernelOps(KernelOps):
    """The moves of rows, shared by threads; every row is summed by one of them."""

    def gather_rows(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        out = np.empty((len(index), x.shape[1]), x.dtype)
        self._by_rows(kernels.gather, out, rows_of(x), index)
        return out

    def combine_rows(
        self,
        rows: np.ndarray,
        places: np.ndarray,
        gates: np.ndarray | None,
        *,
        out: np.ndarray,
    ) -> None:
        if gates is None:
            gates = np.ones(places.shape, self.dtype)
        views = rows_of(rows), rows_of(places), rows_of(gates)
        self._by_rows(kernels.combine, out, *views)

    def combine_rows_bwd(
        self,
        dy: np.ndarray,
        rows: np.ndarray,
        tokens: np.ndarray,
        slots: np.ndarray,
        gates: np.ndarray,
        *,
        dgates: np.ndarray,
    ) -> np.ndarray:
        dx = self.empty_operand(rows.shape)
        views = rows_of(dy), rows_of(rows), tokens, slots, rows_of(gates)
        self._by_rows(kernels.combine_back, dx, *views, dgates)
        return dx
