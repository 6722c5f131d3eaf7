"""LayerNorm and RMSNorm by CUDA kernels."""

import math
from typing import Any

from mpipar.ops.cuda.elementwise import CudaElementwiseOps
from mpipar.ops.cuda.launch import KEPT_SHARED

Array = Any


class CudaNormOps(CudaElementwiseOps):
    """Norms; gradients of gain and bias are sums of sums of blocks."""

    def layernorm_fwd(
        self, x: Array, gain: Array, bias: Array, *, eps: float
    ) -> tuple[Array, Array, Array]:
        mean = self.empty(x.shape[:-1])
        y, rstd = self._norm_fwd(x, gain, bias, mean, eps)
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
        gain = self._either(gain)
        if bias is not None:
            bias = self._solid(self.wide(bias) if bias.dtype != gain.dtype else bias)
            gain = self._solid(self.wide(gain) if bias.dtype != gain.dtype else gain)
        types = [self.dtype, self.operand_dtype, gain.dtype, mean is not None]
        self.launch.by_row(
            "norm_fwd", types, math.prod(x.shape[:-1]), width,
            x, gain, bias, y, mean, rstd, float(eps), kept=width,
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
        rows, count = math.prod(x.shape[:-1]), len(grads)
        blocks = self.launch.blocks_for(rows, width)
        sums = self.empty((count, blocks, width))
        onto = None if onto is None else self._compute(onto)
        dy, gain = self._either(dy), self._either(gain)
        keeps = (count + 2) * width * self.dtype.itemsize <= KEPT_SHARED
        self.launch.by_rows(
            "norm_bwd", [dy.dtype, self.dtype, gain.dtype, mean is not None],
            blocks, rows, width,
            dy, self._compute(x), mean, rstd, gain, onto, dx, sums[0],
            None if mean is None else sums[1], int(keeps),
            kept=(count + 2 * keeps) * width,
        )  # fmt: skip
        self._add_sums(sums, grads)
        return dx
