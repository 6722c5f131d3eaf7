"""Ranks exchange heads for positions: each attends over a longer sequence with fewer
heads.

Source   Jacobs et al. 2023 (DeepSpeed Ulysses); Fang & Zhao 2024 (with a ring, USP)
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpipar.layers.base import Step
from mpipar.layers.context.core import Core, Dropout, Heads
from mpipar.layers.cost import Cost
from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class UlyssesSaved:
    """q, k, v and o of the own heads at all positions, and what the core saved."""

    qkv: tuple[Array, Array, Array]
    o: Array
    core: Any


class UlyssesCore(Core):
    """An all-to-all over u ranks before and after attention by another core.

    A rank has n/u of the query heads there, and g/u key/value heads; where there are
    fewer of these than ranks, u/g neighbours have the same one. What the core saves,
    it saves for u·s positions and n/u heads.

    Saves     q, k, v, o of the own heads: b·s·(n + 2·g'·u + n) items, g' of them held
    Moves     forward all-to-all of q, k, v and of o; backward of do and of dq, dk, dv:
              (u−1)/u of 2·b·s·(2·n + 2·g'·u)·h items in all
    """

    keeps_inputs = True

    def __init__(self, ops: Ops, axis: Any, core: Core) -> None:
        self.ops, self.axis, self.core = ops, axis, core

    def forward(
        self, q: Array, k: Array, v: Array, step: Step, heads: Heads, dropout: Dropout
    ) -> tuple[Array, UlyssesSaved]:
        own = self._own(heads)
        parts = [self._spread(x) for x in (q, k, v)]
        got = self._to_heads(self.ops.xp.concatenate(parts, axis=3))
        n, g = own.queries, own.keys
        qkv = got[:, :, :n], got[:, :, n : n + g], got[:, :, n + g :]
        o, kept = self.core.forward(*qkv, step, own, self._of_own_heads(dropout, own))
        return self._to_positions(o), UlyssesSaved(qkv, o, kept)

    def backward(
        self,
        do: Array,
        inputs: tuple[Array, Array, Array] | None,
        o: Array,
        saved: UlyssesSaved,
        step: Step,
        heads: Heads,
        dropout: Dropout,
        grads: tuple[Array, Array, Array],
    ) -> None:
        own = self._own(heads)
        do = self._to_heads(self._spread(do))
        n, g = own.queries, own.keys
        b, s, _, h = do.shape
        shape, like = (b, s, n + 2 * g, h), grads[0].dtype
        if like == self.ops.dtype:
            fused = self.ops.zeros(shape)
        else:
            fused = self.ops.empty_operand(shape)
        parts = fused[:, :, :n], fused[:, :, n : n + g], fused[:, :, n + g :]
        self.core.backward(
            do, saved.qkv, saved.o, saved.core, step, own,
            self._of_own_heads(dropout, own), parts,
        )  # fmt: skip
        back = self._exchange(self._by_positions(fused))
        for grad, lo, hi in zip(
            grads, (0, n, n + g), (n, n + g, n + 2 * g), strict=True
        ):
            self._collect(back[..., lo:hi, :], grad)

    def positions(self, length: int) -> np.ndarray:
        return self.core.positions(length).reshape(self.axis.size, -1)[self.axis.rank]

    def cost(self, batch: int, sequence: int, heads: Heads) -> Cost:
        u, own, item = self.axis.size, self._own(heads), self.head_bytes
        operand = self.ops.operand_dtype.itemsize
        one = batch * sequence * u * heads.width
        fused = one * (own.queries + 2 * own.keys) * item
        q, o = one * own.queries * item, one * own.queries * operand
        inner = self.core.cost(batch, sequence * u, own)
        key = self.axis.name, "all_to_all"
        sent = (2 * fused + q + o) * (u - 1) // u
        return inner + Cost(
            saved=fused + o, calls=Counter({key: 4}), moved=Counter({key: sent})
        )

    def _own(self, heads: Heads) -> Heads:
        u = self.axis.size
        return replace(heads, queries=heads.queries // u, keys=max(1, heads.keys // u))

    def _of_own_heads(self, dropout: Dropout, own: Heads) -> Dropout:
        first = self.axis.rank * own.queries

        def tiles(queries: np.ndarray, keys: np.ndarray, head: int) -> Any:
            return dropout(queries, keys, first + head)

        return tiles

    def _spread(self, x: Array) -> Array:
        """Heads by the rank that gets them.   (b, s, n, h) → (u, b, s, n/u or 1, h)"""
        u, (b, s, n, h) = self.axis.size, x.shape
        if n >= u:
            return x.reshape(b, s, u, n // u, h).transpose(2, 0, 1, 3, 4)
        places = np.arange(u) * n // u
        return x[:, :, places, None].transpose(2, 0, 1, 3, 4)

    def _collect(self, back: Array, grad: Array) -> None:
        """Writes what each rank has for its heads.   back (u, b, s, n/u or 1, h)"""
        u, (b, s, n, h) = self.axis.size, grad.shape
        if n >= u:
            grad[...] = back.transpose(1, 2, 0, 3, 4).reshape(b, s, n, h)
            return
        # Ranks with the same head lie next to each other.
        parts = self.ops.wide(back[..., 0, :]).reshape(n, u // n, b, s, h)
        for head, part in enumerate(parts.sum(axis=1)):
            self.ops.store(part, grad[:, :, head])

    def _exchange(self, x: Array) -> Array:
        return self.axis.all_to_all(self.ops.xp.ascontiguousarray(x))

    def _to_heads(self, x: Array) -> Array:
        """(u, b, s, m, h) by rank → own heads at all positions (b, u·s, m, h)."""
        got = self._exchange(x)
        u, b, s, m, h = got.shape
        return got.transpose(1, 0, 2, 3, 4).reshape(b, u * s, m, h)

    def _by_positions(self, x: Array) -> Array:
        """(b, u·s, m, h) → (u, b, s, m, h)."""
        b, length, m, h = x.shape
        u = self.axis.size
        return x.reshape(b, u, length // u, m, h).transpose(1, 0, 2, 3, 4)

    def _to_positions(self, x: Array) -> Array:
        """Own heads at all positions → all heads at the own ones (b, s, n, h)."""
        got = self._exchange(self._by_positions(x))
        u, b, s, m, h = got.shape
        return got.transpose(1, 2, 0, 3, 4).reshape(b, s, u * m, h)
