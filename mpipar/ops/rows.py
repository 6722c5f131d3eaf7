"""Rows of tokens on their way to experts and back."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

Array = Any


class RowOps:
    """Moves of rows in `Ops`, which gives them xp and what handles 16-bit arrays."""

    xp: ModuleType
    wide: Callable[[Array], Array]
    operand: Callable[[Array], Array]

    def gather_rows(self, x: Array, index: Array) -> Array:
        """Rows x[index] in a new array.   x (t, d) of either type, index (n,)"""
        return x[index]

    def combine_rows(
        self, rows: Array, places: Array, gates: Array | None, *, out: Array
    ) -> None:
        """out[i] += Σ_k gates[i, k] · rows[places[i, k]], k after k, whatever the other
        rows are; places from n on are skipped.

        Shapes   rows (n, d), places (t, k), gates (t, k) or None = 1, out (t, d)
        """
        for slot in range(places.shape[1]):
            tokens = self.xp.flatnonzero(places[:, slot] < len(rows))
            own = rows[places[tokens, slot]]
            out[tokens] += own if gates is None else own * gates[tokens, slot, None]

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
        """Gradients gates[tokens, slots] · dy[tokens] of rows, operands.

        Writes dgates[tokens, slots] = Σ_d dy[tokens] · rows; the rest stays.

        Shapes   dy (t, d) an operand, rows (n, d); tokens, slots (n,), no pair of them
                 twice; gates, dgates (t, k)  →  (n, d)
        """
        d = self.wide(dy)[tokens]
        dgates[tokens, slots] = self.xp.einsum("nd,nd->n", d, rows)
        return self.operand(d * gates[tokens, slots][:, None])
