"""Ring attention: keys and values travel, queries stay.

In hop i rank r works on the block of rank r − i, while the next one is on its way. The
parts of the output are merged by their log-sum-exp. In the backward pass gradients of
keys and values travel with them and return home.

Source   Liu et al. 2023 (Ring Attention), Brandon et al. 2023 (Striped Attention)
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpipar.layers.base import Step
from mpipar.layers.context.core import Core, Dropout, Heads, own_cost, spans_of
from mpipar.layers.context.cut import Cut
from mpipar.layers.cost import Cost
from mpipar.ops import Ops
from mpipar.ops.spans import pairs

Array = Any
VALUES, GRADIENTS = 0, 1  # tags of messages


class RingCore(Core):
    """Attention over a sequence whose blocks lie on the ranks of a ring of n.

    Hops after the last one that any rank needs, with a window, are left out: H ≤ n are
    made.

    Saves     the log-sum-exp, b·s·n items
    Moves     forward (H−1) messages of 2·b·s·g·h items; backward as many of the same,
              and H of gradients, of which the last brings them home (0 if H = 1)
    Holds     two buffers for keys and values, backward three more for their gradients
    """

    def __init__(self, ops: Ops, axis: Any, cut: Cut) -> None:
        self.ops, self.axis, self.cut = ops, axis, cut
        self._hops: dict[tuple[int, int], int] = {}

    def forward(
        self, q: Array, k: Array, v: Array, step: Step, heads: Heads, dropout: Dropout
    ) -> tuple[Array, Array]:
        length = q.shape[1] * self.axis.size
        queries, o, lse = self.positions(length), None, None
        for keys, kv in self._blocks(k, v, length, heads):
            spans = spans_of(step, heads, queries, keys)
            if o is not None and not pairs(spans):
                continue
            part = self.ops.attention_fwd(
                q, *kv, scale=heads.scale, spans=spans, part=True,
                dropout=dropout(queries, keys, 0),
            )  # fmt: skip
            if o is None:
                o, lse = part
            else:
                self.ops.attention_merge(o, lse, *part)
        return self.ops.operand(o), lse

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
        axis, length = self.axis, q.shape[1] * self.axis.size
        queries, (dq, dk, dv) = self.positions(length), grads
        # Sums over hops are of the compute type.
        sums = dq if dq.dtype == self.ops.dtype else self.ops.zeros(dq.shape)
        home = _Homeward(self.ops, axis, self.hops(length, heads))
        for keys, kv in self._blocks(k, v, length, heads):
            spans = spans_of(step, heads, queries, keys)
            own = home.buffer(kv)
            if pairs(spans):
                self.ops.attention_bwd(
                    do, q, *kv, o, saved, dq=sums, dk=own[0], dv=own[1],
                    scale=heads.scale, spans=spans, dropout=dropout(queries, keys, 0),
                )  # fmt: skip
            home.send(own)
        mine = home.wait()
        if sums is not dq:
            self.ops.store(sums, dq)
        self.ops.store(mine[0], dk)
        self.ops.store(mine[1], dv)

    def positions(self, length: int) -> np.ndarray:
        return self.cut.of_block(length, self.axis.rank)

    def hops(self, length: int, heads: Heads) -> int:
        """Blocks that a rank works on; the same for all."""
        name = length, heads.window
        if name not in self._hops:
            self._hops[name] = self._count_hops(length, heads)
        return self._hops[name]

    def cost(self, batch: int, sequence: int, heads: Heads) -> Cost:
        n, item = self.axis.size, self.ops.dtype.itemsize
        hops = self.hops(sequence * n, heads)
        block = 2 * batch * sequence * heads.keys * heads.width
        values, gradients = 2 * (hops - 1), hops if hops > 1 else 0
        moved = block * (values * self.head_bytes + gradients * item)
        key = self.axis.name, "send"
        messages = Cost(
            calls=Counter({key: values + gradients}), moved=Counter({key: moved})
        )
        return own_cost(self.ops, batch, sequence, n, heads) + messages

    def _count_hops(self, length: int, heads: Heads) -> int:
        """Documents may need fewer, but not more."""
        n, most = self.axis.size, 1
        if not heads.window:
            return n
        step = Step(positions=None, samples=None)
        for rank in range(n):
            queries = self.cut.of_block(length, rank)
            for hop in range(most, n):
                keys = self.cut.of_block(length, (rank - hop) % n)
                if pairs(spans_of(step, heads, queries, keys)):
                    most = hop + 1
        return most

    def _blocks(
        self, k: Array, v: Array, length: int, heads: Heads
    ) -> Iterator[tuple[np.ndarray, Array]]:
        """(positions, [keys, values]) of each hop, the next one on its way."""
        axis, hops = self.axis, self.hops(length, heads)
        after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        here = self.ops.xp.empty((2, *k.shape), k.dtype)
        here[0], here[1] = k, v
        spare = self.ops.xp.empty_like(here) if hops > 1 else None
        for hop in range(hops):
            moving = []
            if hop + 1 < hops:
                moving.append(axis.recv_start(spare, before, VALUES))
                moving.append(axis.send_start(here, after, VALUES))
            yield self.cut.of_block(length, (axis.rank - hop) % axis.size), here
            for handle in moving:
                handle.wait()
            here, spare = spare, here


class _Homeward:
    """Gradients of keys and values, which grow on their way around the ring."""

    def __init__(self, ops: Ops, axis: Any, hops: int) -> None:
        self.ops, self.axis, self.hops, self.hop = ops, axis, hops, 0
        self._buffers: list[Array] = []
        self._last: Array = None
        self._arriving: Any = None
        self._leaving: list[Any] = []

    def buffer(self, like: Array) -> Array:
        """Zeros for what this rank adds in this hop."""
        if not self._buffers:
            count = 1 if self.hops == 1 else 3
            self._buffers = [self.ops.empty(like.shape) for _ in range(count)]
        own = self._buffers[self.hop % 2]
        own[...] = 0.0
        return own

    def send(self, own: Array) -> None:
        """Adds what came, and passes it on; the last time straight home."""
        axis, rank, n = self.axis, self.axis.rank, self.axis.size
        if self._arriving is not None:
            own += self._arriving.wait()
        for handle in self._leaving:
            handle.wait()
        self._leaving, self.hop = [], self.hop + 1
        self._last = own
        if self.hops == 1:
            return
        if self.hop < self.hops:
            to, source = (rank + 1) % n, (rank - 1) % n
        else:
            to, source = (rank - self.hops + 1) % n, (rank + self.hops - 1) % n
        self._arriving = axis.recv_start(self._buffers[2], source, GRADIENTS)
        self._leaving = [axis.send_start(own, to, GRADIENTS)]

    def wait(self) -> Array:
        """The sum over all ranks, of the own keys and values."""
        mine = self._last if self._arriving is None else self._arriving.wait()
        for handle in self._leaving:
            handle.wait()
        return mine
