"""Keys and values of the whole sequence on every rank, for as long as attention runs.

Source   Llama team 2024 (The Llama 3 herd of models), section 3.3.2
"""

from typing import Any

import numpy as np

from mpipar.comm import P, R, S
from mpipar.layers.base import Step
from mpipar.layers.context.core import Dropout, Heads, LocalCore, own_cost
from mpipar.layers.context.cut import Cut
from mpipar.layers.cost import Cost, move
from mpipar.ops import Ops

Array = Any


class GatheredCore(LocalCore):
    """Every rank gathers the keys and values of all n; then as on one rank.

    Saves     the log-sum-exp, b·s·n items; keys and values are gathered again
    Moves     forward all-gather, backward all-gather and reduce-scatter, of
              2·b·(n·s)·g·h items, (n−1)/n of which are sent
    Holds     keys and values of the whole sequence twice, backward also their gradients
    """

    def __init__(self, ops: Ops, axis: Any, cut: Cut) -> None:
        super().__init__(ops)
        self.axis, self.cut = axis, cut

    def forward(
        self, q: Array, k: Array, v: Array, step: Step, heads: Heads, dropout: Dropout
    ) -> tuple[Array, Array]:
        return super().forward(q, *self._whole(k, v), step, heads, dropout)

    def backward(
        self,
        do: Array,
        inputs: tuple[Array, Array, Array] | None,
        o: Array,
        saved: Array,
        step: Step,
        heads: Heads,
        dropout: Dropout,
        grads: tuple[Array, Array, Array],
    ) -> None:
        q, k, v = inputs
        whole, (dq, dk, dv) = self._whole(k, v), grads
        sums = self.ops.zeros(whole.shape)
        common = o, saved, step, heads, dropout
        super().backward(do, (q, *whole), *common, (dq, *sums))
        length, parts = whole.shape[2], []
        for rank in range(self.axis.size):
            parts.append(sums[:, :, self.cut.of_block(length, rank)])
        own = self.axis.reduce_scatter(self.ops.xp.concatenate(parts))
        self.ops.store(own[0], dk)
        self.ops.store(own[1], dv)

    def positions(self, length: int) -> np.ndarray:
        return self.cut.of_block(length, self.axis.rank)

    def cost(self, batch: int, sequence: int, heads: Heads) -> Cost:
        n, item = self.axis.size, self.ops.dtype.itemsize
        whole = 2 * batch * sequence * n * heads.keys * heads.width
        here = own_cost(self.ops, batch, sequence, n, heads)
        for source, target in ((S(0), R), (S(0), R), (P, S(0))):
            size = whole * (self.head_bytes if target == R else item)
            here += move(self.axis.name, n, source, target, size)
        return here

    def _whole(self, k: Array, v: Array) -> Array:
        """Keys and values of all ranks, by position.   →  (2, b, n·s, g, h)"""
        gathered = self.axis.all_gather(self.ops.xp.stack([k, v]))
        b, s, g, h = k.shape
        length = s * self.axis.size
        whole = self.ops.xp.empty((2, b, length, g, h), k.dtype)
        for rank in range(self.axis.size):
            places = self.cut.of_block(length, rank)
            whole[:, :, places] = gathered[2 * rank : 2 * rank + 2]
        return whole

    def _places(self, step: Step, k: Array) -> tuple[np.ndarray, np.ndarray]:
        length = k.shape[1]
        return self.positions(length), np.arange(length)
