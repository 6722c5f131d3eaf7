"""What every way to attend over a cut sequence has in common; and one rank alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.layers.base import Step
from mpipar.layers.cost import Cost
from mpipar.ops import Ops
from mpipar.ops.attention import Draws
from mpipar.ops.spans import spans_between

Array = Any
# (positions of queries, positions of keys, first head) → what is dropped
Dropout = Callable[[np.ndarray, np.ndarray, int], Draws | None]


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention layer on this rank, and what its queries see.

    queries, keys   heads;  width  of one;  scale  of scores
    window          positions that a query sees, its own included; 0 = all before it
    """

    queries: int
    keys: int
    width: int
    scale: float
    window: int = 0


class Core:
    """o = softmax(scale · q kᵀ + mask) v of the queries of this rank, over all keys.

    The mask is causal, inside of a document and of a window. The sequence lies on the
    context axis as `Cut` says; q, k and v are rotated already.

    Shapes    q, o (b, s, n, h);  k, v (b, s, g, h), s the positions of this rank
    Types     q, k, v and do are operands where the ops want narrow results
    keeps_inputs   True where `forward` saves what it needs of q, k and v itself
    """

    keeps_inputs = False
    ops: Ops

    def forward(
        self, q: Array, k: Array, v: Array, step: Step, heads: Heads, dropout: Dropout
    ) -> tuple[Array, Any]:
        """o of the operand type, and what the backward pass needs."""
        raise NotImplementedError

    def backward(
        self,
        do: Array,
        inputs: tuple[Array, Array, Array] | None,
        o: Array,
        saved: Any,
        step: Step,
        heads: Heads,
        dropout: Dropout,
        grads: tuple[Array, Array, Array],
    ) -> None:
        """Writes grads (dq, dk, dv): zeros, or operands that hold nothing yet.

        inputs   q, k, v; None where they were kept
        """
        raise NotImplementedError

    @property
    def head_bytes(self) -> int:
        """Of an item of q, k and v."""
        ops = self.ops
        return (ops.operand_dtype if ops.narrow_results else ops.dtype).itemsize

    def positions(self, length: int) -> np.ndarray:
        """Positions of a sequence whose queries this core is given, ascending."""
        raise NotImplementedError

    def cost(self, batch: int, sequence: int, heads: Heads) -> Cost:
        """Of `sequence` positions on this rank, as if all were one document.

        Flops are the mean over the ranks that share the sequence.
        """
        raise NotImplementedError


class LocalCore(Core):
    """All keys are here, in generation those of a cache.

    Saves     the log-sum-exp, b·s·n items
    Moves     nothing
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def forward(
        self, q: Array, k: Array, v: Array, step: Step, heads: Heads, dropout: Dropout
    ) -> tuple[Array, Array]:
        queries, keys = self._places(step, k)
        return self.ops.attention_fwd(
            q, k, v, scale=heads.scale, spans=spans_of(step, heads, queries, keys),
            dropout=dropout(queries, keys, 0),
        )  # fmt: skip

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
        queries, keys = self._places(step, k)
        dq, dk, dv = grads
        self.ops.attention_bwd(
            do, q, k, v, o, saved, dq=dq, dk=dk, dv=dv, scale=heads.scale,
            spans=spans_of(step, heads, queries, keys),
            dropout=dropout(queries, keys, 0),
        )  # fmt: skip

    def positions(self, length: int) -> np.ndarray:
        return np.arange(length)

    def cost(self, batch: int, sequence: int, heads: Heads) -> Cost:
        return own_cost(self.ops, batch, sequence, 1, heads)

    def _places(self, step: Step, k: Array) -> tuple[np.ndarray, np.ndarray]:
        keys = np.arange(k.shape[1])
        past = 0 if step.cache is None else step.cache.length
        return keys[past:], keys


def spans_of(
    step: Step, heads: Heads, queries: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Spans of keys at these positions that queries at those see; kept with the
    micro-batch, whose layers all ask for the same."""
    name = (
        heads.window, len(queries), int(queries[0]), len(keys), int(keys[0]),
        int(queries[-1]), int(keys[-1]),
    )  # fmt: skip
    if name not in step.kept:
        firsts = np.zeros((1, len(queries)), np.int64)
        if step.firsts is not None:
            firsts = step.firsts[:, queries]
        if heads.window:
            firsts = np.maximum(firsts, queries - heads.window + 1)
        step.kept[name] = spans_between(queries, firsts, keys)
    return step.kept[name]


def own_cost(ops: Ops, batch: int, sequence: int, ranks: int, heads: Heads) -> Cost:
    """Flops and the log-sum-exp of causal sequences that `ranks` ranks hold `sequence`
    positions each of: the mean of a rank."""
    length = sequence * ranks
    hidden = max(0, length - heads.window) if heads.window else 0
    pairs = (length * (length + 1) - hidden * (hidden + 1)) // 2 // ranks
    return Cost(
        flops=batch * heads.queries * ops.attention_flops(pairs, heads.width),
        saved=batch * sequence * heads.queries * ops.dtype.itemsize,
    )
