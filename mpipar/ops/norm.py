"""LayerNorm and RMSNorm over the last dim."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

Array = Any


class NormOps:
    """The norms of `Ops`, which gives them xp and what handles 16-bit arrays.

    y is of the operand type; gain, bias and their gradients may be 16-bit.
    """

    xp: ModuleType
    wide: Callable[[Array], Array]
    operand: Callable[[Array], Array]
    add_to: Callable[[Array, Array], None]
    add_residual: Callable[[Array, Array | None, Array | None], Array]

    def layernorm_fwd(
        self, x: Array, gain: Array, bias: Array, *, eps: float
    ) -> tuple[Array, Array, Array]:
        """y = (x − μ)·r·gain + bias, r = 1/√(var + eps).   Ba et al. 2016

        Shapes   x (..., d)  →  y (..., d), mean (...), rstd (...)
        """
        mean = x.mean(axis=-1)
        y = x - mean[..., None]
        rstd = 1.0 / self.xp.sqrt((y * y).mean(axis=-1) + eps)
        y *= rstd[..., None]
        y *= self.wide(gain)
        y += self.wide(bias)
        return self.operand(y), mean, rstd

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
        """dx = r(dŷ − mean(dŷ) − x̂·mean(dŷ·x̂)) + onto, dŷ = dy·gain; adds to dgain,
        dbias."""
        hat = (x - mean[..., None]) * rstd[..., None]
        self.add_to(dgain, (dy * hat).reshape(-1, x.shape[-1]).sum(axis=0))
        self.add_to(dbias, dy.reshape(-1, x.shape[-1]).sum(axis=0))
        d = dy * self.wide(gain)
        c1 = d.mean(axis=-1, keepdims=True)
        c2 = (d * hat).mean(axis=-1, keepdims=True)
        return self.add_residual((d - c1 - hat * c2) * rstd[..., None], None, onto)

    def rmsnorm_fwd(self, x: Array, gain: Array, *, eps: float) -> tuple[Array, Array]:
        """y = x·r·gain, r = 1/√(mean(x²) + eps).   Zhang & Sennrich 2019

        Shapes   x (..., d)  →  y (..., d), rstd (...)
        """
        rstd = 1.0 / self.xp.sqrt((x * x).mean(axis=-1) + eps)
        return self.operand(x * rstd[..., None] * self.wide(gain)), rstd

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
        """dx = r(dŷ − x̂·mean(dŷ·x̂)) + onto with dŷ = dy·gain; adds to dgain."""
        hat = x * rstd[..., None]
        self.add_to(dgain, (dy * hat).reshape(-1, x.shape[-1]).sum(axis=0))
        d = dy * self.wide(gain)
        c2 = (d * hat).mean(axis=-1, keepdims=True)
        return self.add_residual((d - hat * c2) * rstd[..., None], None, onto)
