"""Causal self-attention with its projections: MHA, GQA and MQA."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.layers.base import Branch, Step
from mpipar.layers.context import Core, Dropout, Heads, LocalCore
from mpipar.layers.cost import Cost
from mpipar.layers.parameter import Parameter, cut
from mpipar.layers.rope import Rope
from mpipar.layers.stream import Stream
from mpipar.layers.tensor.one_d import (
    ColumnLinear,
    LinearSaved,
    Output,
    RowLinear,
    even_output,
)
from mpipar.ops import Ops
from mpipar.ops.attention import Draws
from mpipar.ops.philox import stream_key

Array = Any


@dataclass(slots=True)
class AttentionSaved:
    """Inputs of the projections, fused q, k, v (rotated; None where the core keeps
    them), and what the core needs."""

    inputs: LinearSaved
    qkv: Array
    core: Any
    outputs: LinearSaved
    step: Step


@dataclass(slots=True)
class AttentionLeft:
    """What the weight gradients of both projections need."""

    inputs: Any
    outputs: Any


def key_value_output(name: str, heads: int, head_width: int, tp: Any) -> Output:
    """Key or value rows of this rank.

    Where tp is larger than the number of heads, r = tp/heads consecutive ranks hold the
    same head and their gradients are summed over the axis "kv".
    """
    copies = max(1, tp.size // heads)
    lo, hi = cut(heads, tp.size // copies, tp.rank // copies)
    return Output(
        name,
        heads * head_width,
        (lo * head_width, hi * head_width),
        partial="kv" if copies > 1 else "",
        owner=tp.rank % copies == 0,
    )


class CausalSelfAttention(Branch):
    """y = concat_heads(softmax(q kᵀ/√h + mask) v) Woᵀ + bo, heads cut over tp.

    Shapes    x, y (b, s/u, d)  stream layout; u = tp under sequence parallelism, else 1
              q (b, s, n/tp, h)   k, v (b, s, g', h) with g' = max(1, g/tp)
    Backward  as `Ops.attention_bwd`, then the two projections; dx summed over tp
    Saves     the input of each projection (operand items), and q k v and the
              log-sum-exp or what the core keeps instead. On one rank:
              b·s/u·d + b·s·(2n + 2g'·tp)·h/tp + b·s·n/tp items
    Moves     as ColumnLinear plus RowLinear, and as the core
    Flops     the projections, and those of the core
    Precision softmax statistics and sums in the compute type; q, k, v, o and their
              gradients are operands where the ops want narrow results
    Raises    nothing; divisibility of heads by tp is the recipe's rule
    Source    Vaswani et al. 2017; Shazeer 2019 (multi-query); Ainslie et al. 2023 (GQA)
    """

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        ops: Ops,
        stream: Stream,
        std: float,
        out_std: float,
        bias: bool,
        rope: Rope | None = None,
        dropout: float = 0.0,
        window: int = 0,
        core: Core | None = None,
    ) -> None:
        """window: positions that a query sees, its own included, 0 = all before it;
        core: how the sequence is cut, by itself not at all."""
        self.name, self.ops, self.rope, self.dropout = name, ops, rope, dropout
        self.window, self.core = window, core or LocalCore(ops)
        self.head_width = width // heads
        tp = stream.tp
        self.first_head, last = cut(heads, tp.size, tp.rank)
        self.heads = last - self.first_head
        shared = {"ops": ops, "stream": stream, "bias": bias, "narrow": True}
        outputs = [
            even_output(f"{name}.q", width, tp),
            key_value_output(f"{name}.k", kv_heads, self.head_width, tp),
            key_value_output(f"{name}.v", kv_heads, self.head_width, tp),
        ]
        self.kv_heads = max(1, kv_heads // tp.size)
        self.inputs = ColumnLinear.build(outputs, width, std=std, **shared)
        self.outputs = RowLinear(f"{name}.out", width, width, std=out_std, **shared)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.inputs.parameters()
        yield from self.outputs.parameters()

    def forward(
        self, x: Array, step: Step, onto: Array | None = None
    ) -> tuple[Array, AttentionSaved]:
        qkv, inputs = self.inputs.forward(x, step)
        q, k, v = self._heads(qkv)
        if self.rope is not None:
            self.rope.rotate(q, step.positions)
            self.rope.rotate(k, step.positions)
        if step.cache is not None:
            k, v = step.cache.extend(self.name, k, v)
        shared = step, self._sizes, self._dropout(step)
        o, core = self.core.forward(q, k, v, *shared)
        y, outputs = self.outputs.forward(o.reshape(*o.shape[:2], -1), step, onto)
        kept = None if self.core.keeps_inputs else qkv
        return y, AttentionSaved(inputs, kept, core, outputs, step)

    def backward_input(
        self, dy: Array, saved: AttentionSaved
    ) -> tuple[Array, AttentionLeft]:
        dout, outputs = self.outputs.backward_input(dy, saved.outputs)
        b, s, _ = dout.shape
        dout = dout.reshape(b, s, self.heads, self.head_width)
        columns = (self.heads + 2 * self.kv_heads) * self.head_width
        if self.ops.narrow_results:
            dqkv = self.ops.empty_operand((b, s, columns))
        else:
            dqkv = self.ops.zeros((b, s, columns))
        grads, step = self._heads(dqkv), saved.step
        self.core.backward(
            dout,
            None if saved.qkv is None else self._heads(saved.qkv),
            saved.outputs.x.reshape(dout.shape),
            saved.core,
            step,
            self._sizes,
            self._dropout(step),
            grads,
        )
        if self.rope is not None:
            for grad in grads[:2]:
                self.rope.rotate(grad, step.positions, inverse=True)
        dx, inputs = self.inputs.backward_input(dqkv, saved.inputs)
        return dx, AttentionLeft(inputs, outputs)

    def backward_weight(self, left: AttentionLeft) -> None:
        self.outputs.backward_weight(left.outputs)
        self.inputs.backward_weight(left.inputs)

    def cost(self, batch: int, sequence: int) -> Cost:
        columns = (self.heads + 2 * self.kv_heads) * self.head_width
        kept = 0 if self.core.keeps_inputs else columns
        own = Cost(saved=batch * sequence * kept * self.core.head_bytes)
        projections = self.inputs.cost(batch, sequence)
        projections += self.outputs.cost(batch, sequence)
        return own + projections + self.core.cost(batch, sequence, self._sizes)

    @property
    def _sizes(self) -> Heads:
        scale = 1.0 / math.sqrt(self.head_width)
        return Heads(self.heads, self.kv_heads, self.head_width, scale, self.window)

    def _heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Views (b, s, heads, h) of q, k and v in the fused array."""
        n, g, h = self.heads, self.kv_heads, self.head_width
        fused = qkv.reshape(*qkv.shape[:2], n + 2 * g, h)
        return fused[:, :, :n], fused[:, :, n : n + g], fused[:, :, n + g :]

    def _dropout(self, step: Step) -> Dropout:
        """What is dropped of the probabilities, by global head and position."""
        if not self.dropout or not step.training:
            return lambda queries, keys, first: None

        def draws(queries: np.ndarray, keys: np.ndarray, first: int) -> Draws:
            streams = tuple(
                stream_key(step.seed, f"{self.name}.{head}")
                for head in range(self.first_head + first, self.first_head + self.heads)
            )
            return Draws(
                self.dropout, streams, step.samples, step.number, queries, keys,
                self.ops,
            )  # fmt: skip

        return draws
