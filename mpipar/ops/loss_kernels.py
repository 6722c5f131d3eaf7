"""Loss and optimizer by kernels."""

import math
from collections.abc import Callable

import numpy as np

from mpipar.ops.kernels import loss, optimizer
from mpipar.ops.row_kernels import RowKernelOps
from mpipar.ops.runner import rows_of


class LossKernelOps(RowKernelOps):
    """Where a step turns from forward to backward, and where it ends."""

    def row_max(self, logits: np.ndarray) -> np.ndarray:
        peak = np.empty(logits.shape[:-1], self.dtype)
        self._by_rows(loss.row_max, rows_of(logits), peak.reshape(-1))
        return peak

    def xent_fwd(
        self,
        logits: np.ndarray,
        local: np.ndarray,
        join: Callable[[np.ndarray], np.ndarray],
    ) -> tuple[np.ndarray, ...]:
        peak = join(self.row_max(logits))
        total, target = np.empty_like(peak), np.empty_like(peak)
        self._by_rows(loss.exponentials, logits, local, peak, total, target)
        return peak, total, target

    def xent_dx(
        self,
        e: np.ndarray,
        peak: np.ndarray,
        total: np.ndarray,
        local: np.ndarray,
        seed: np.ndarray,
    ) -> np.ndarray:
        out = self._over(e)
        self._by_rows(loss.softmax_back, e, total, local, seed, out)
        return out

    def square_sum(self, x: np.ndarray) -> float:
        total = np.zeros(1)
        self._summed(optimizer.square_sum, x, sums=[total], chunk=1 << 16)
        return float(total[0])

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
        rounded: np.ndarray | None = None,
    ) -> None:
        rate, unbias = lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)
        numbers = (rate, unbias, beta1, beta2, eps, 1.0 - lr * decay, scale)
        constants = np.array(numbers, self.dtype)
        self._by_rows(optimizer.adamw, weight, grad, m, v, constants)
        if rounded is not None:
            self.operand(weight, out=rounded)
