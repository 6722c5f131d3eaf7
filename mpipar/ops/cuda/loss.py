"""Cross-entropy by CUDA kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.ops.cuda.arrays import CudaArrayOps, spaced

Array = Any


class CudaLossOps(CudaArrayOps):
    """Cross-entropy over the columns that one rank holds.

    Forward only reads logits, once; backward reads them once and makes dlogits, over
    them where they are operands. What the reference calls e are the logits themselves.
    """

    def xent_fwd(
        self, logits: Array, local: Array, join: Callable[[Array], Array]
    ) -> tuple[Array, Array, Array]:
        step, local = self._step(logits), self._index(local)
        rows, width = logits.shape
        own, total, target = (self.empty((rows,)) for _ in range(3))
        self.launch.by_row(
            "xent_fwd", [logits.dtype, self.dtype], rows, width,
            logits, step, local, own, total, target,
        )  # fmt: skip
        # It may write over what it is given.
        peak = self._compute(join(own.copy()))
        self.launch.over_items(
            "xent_merge", [self.dtype], rows, width, own, peak, local, total, target
        )
        return peak, total, target

    def xent_dx(
        self, e: Array, peak: Array, total: Array, local: Array, seed: Array
    ) -> Array:
        logits, step, (rows, width) = e, self._step(e), e.shape
        dlogits = logits
        if logits.dtype != self.operand_dtype:
            dlogits = self._spaced_operand(logits.shape)
        self.launch.by_row(
            "xent_bwd", [logits.dtype, self.dtype, self.operand_dtype], rows, width,
            logits, step, self._compute(peak), self._compute(total),
            self._index(local), self._compute(seed), dlogits, self._step(dlogits),
        )  # fmt: skip
        return dlogits

    def _step(self, logits: Array) -> np.int64:
        """Items from one row of logits to the next.

        Raises ValueError where rows are uneven, TypeError for a third type.
        """
        if logits.dtype not in (self.dtype, self.operand_dtype):
            raise TypeError(f"logits of {logits.dtype} where kernels take {self.dtype}")
        return spaced(logits)[1]

    def loss_sum(self, total: Array, target: Array, labels: Array) -> Array:
        sum = self.xp.zeros((), np.float64)
        self.launch.over_items(
            "loss_sum", [self.dtype], total.size,
            self._compute(total), self._compute(target), self._index(labels), sum,
            blocks=1,
        )  # fmt: skip
        return sum
