"""LayerNorm and RMSNorm by CUDA kernels."""

import math
from typing import Any

import numpy as np

from mpipar.ops.cuda.elementwise import CudaElementwiseOps
from mpipar.ops.cuda.launch import SUM_BLOCKS

Array = Any


class CudaNormOps(CudaElementwiseOps):
    """Norms; gradients of gain and bias are sums of sums of blocks."""

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
