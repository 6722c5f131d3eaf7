"""Rotary position embedding."""

from typing import Any

from mpipar.ops import Ops

Array = Any


class Rope:
    """Rotates q and k by their positions; one table serves all blocks of a micro-batch.

    Shapes   x (b, s, n, h) rotated in place; positions (s,) global
    Source   Su et al. 2021, rotate-half form (halves of a head are the pairs)
    """

    def __init__(self, head_width: int, theta: float, *, ops: Ops) -> None:
        self.head_width, self.theta, self.ops = head_width, theta, ops
        self._positions: Array = None
        self._table: tuple[Array, Array] | None = None

    def rotate(self, x: Array, positions: Array, *, inverse: bool = False) -> None:
        """x ← R(position) x, or its transpose when `inverse`."""
        if self._positions is not positions:
            self._table = self.ops.rope_table(positions, self.head_width, self.theta)
            self._positions = positions
        self.ops.rope(x, *self._table, inverse=inverse)
