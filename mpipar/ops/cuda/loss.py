"""Cross-entropy by CUDA kernels."""

from typing import Any

from mpipar.ops.cuda.arrays import CudaArrayOps

Array = Any


class CudaLossOps(CudaArrayOps):
    """Cross-entropy over the columns that one rank holds."""

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
