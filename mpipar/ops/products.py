"""Matrix products of tokens with weights, and what is added to them."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

Array = Any


class ProductOps:
    """The products of `Ops`, which gives them xp and what handles 16-bit arrays.

    Factors are operands. Results are of the compute type, unless they are to be narrow.
    """

    xp: ModuleType
    wide: Callable[[Array], Array]
    operand: Callable[[Array], Array]
    add_to: Callable[[Array, Array], None]
    narrow_results: bool
    gelu_fwd: Callable[..., tuple[Array, Array]]
    gelu_dx: Callable[[Array, Array], Array]

    def linear_fwd(
        self,
        x: Array,
        w: Array,
        b: Array | None = None,
        onto: Array | None = None,
        *,
        narrow: bool = False,
    ) -> Array:
        """y = x Wᵀ + b + onto, rounded once to an operand where it is to be `narrow`.

        Shapes   x (..., d), W (f, d), b (f,), onto and y (..., f)
        """
        y = self.xp.matmul(self.wide(x.reshape(-1, x.shape[-1])), self.wide(w).T)
        y = self.add_residual(y.reshape(*x.shape[:-1], w.shape[0]), b, onto)
        return self.operand(y) if narrow else y

    def add_residual(self, y: Array, b: Array | None, onto: Array | None) -> Array:
        """y += b + onto, those that there are; returns y.   y, onto (..., f), b (f,)"""
        for summand in (b, onto):
            if summand is not None:
                y += self.wide(summand)
        return y

    def linear_dx(self, dy: Array, w: Array, *, narrow: bool = False) -> Array:
        """dx = dy W, an operand if `narrow`.   dy (..., f), W (f, d)  →  (..., d)"""
        dx = self.xp.matmul(self.wide(dy.reshape(-1, dy.shape[-1])), self.wide(w))
        dx = dx.reshape(*dy.shape[:-1], w.shape[1])
        return self.operand(dx) if narrow else dx

    def linear_dw(self, dy: Array, x: Array, dw: Array) -> None:
        """dW += Σ_tokens dyᵀ x.   dy (..., f), x (..., d), dW (f, d)"""
        dy, x = (self.wide(a.reshape(-1, a.shape[-1])) for a in (dy, x))
        self.add_to(dw, self.xp.matmul(dy.T, x))

    def linear_db(self, dy: Array, db: Array) -> None:
        """db += Σ_tokens dy.   dy (..., f), db (f,)"""
        self.add_to(db, self.wide(dy.reshape(-1, dy.shape[-1])).sum(axis=0))

    def linear_gelu_fwd(
        self, x: Array, w: Array, b: Array | None, *, tanh: bool
    ) -> tuple[Array, Array]:
        """y = GELU(x Wᵀ + b), and what `linear_gelu_dx` needs: operands both.

        Shapes   x (..., d), W (f, d), b (f,)  →  (..., f) each
        tanh     as in `gelu_fwd`
        """
        u = self.linear_fwd(x, w, b, narrow=self.narrow_results)
        return self.gelu_fwd(u, tanh=tanh)

    def linear_gelu_dx(self, dy: Array, w: Array, kept: Array, *, tanh: bool) -> Array:
        """du = (dy W) · GELU′(u), an operand; W is of the product that reads GELU(u).

        Shapes   dy (..., d), W (d, f), kept of `linear_gelu_fwd`  →  (..., f)
        """
        dy = self.linear_dx(dy, w, narrow=self.narrow_results)
        return self.gelu_dx(dy, kept)
