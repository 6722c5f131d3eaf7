"""Token and position embedding, where the residual stream begins."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpipar.layers.base import Layer, Step
from mpipar.layers.cost import Cost
from mpipar.layers.dropout import Dropout
from mpipar.layers.parameter import Parameter, cut
from mpipar.layers.stream import Stream
from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class EmbeddingSaved:
    """Token ids, what dropout saved, and the micro-batch."""

    ids: Array
    dropout: Any
    step: Step


@dataclass(slots=True)
class EmbeddingLeft:
    """Gradients of all tokens and their ids, of the own tokens, and the micro-batch."""

    dy: Array
    ids: Array
    own: Array
    step: Step


def token_weight(
    name: str, vocab: int, width: int, stream: Stream, std: float
) -> Parameter:
    """A weight (vocab, width) of embedding or head, cut by vocabulary over tp."""
    held = cut(vocab, stream.tp.size, stream.tp.rank)
    return Parameter(name, (vocab, width), (held, (0, width)), "normal", std)


class Embedding(Layer):
    """x[i] = E[id_i] (+ P[position_i]), then dropout; E cut by vocabulary over tp.

    Shapes    ids (b, s), same on all tp ranks
              E (v/tp, d)     dim 0 cut over tp, unevenly where tp does not divide v
              P (context, d)  on all tp ranks; absent where positions enter by rotation
              x (b, s/u, d)   stream layout; u = tp under sequence parallelism, else 1
    Backward  dE[id] += Σ dx of its tokens;  dP[position] += Σ_b dx of own tokens
    Saves     ids: 8·b·s bytes
    Moves     R: forward all-reduce 2·(tp−1)/tp · b·s·d items; backward 0
              S(1): forward reduce-scatter, backward all-gather, (tp−1)/tp · b·s·d each
    Flops     none counted
    Precision the compute type
    Raises    nothing: ids outside the vocabulary are refused where batches are made
    Source    Shoeybi et al. 2019, section 3
    """

    def __init__(
        self,
        name: str,
        vocab: int,
        width: int,
        *,
        ops: Ops,
        stream: Stream,
        std: float,
        context: int = 0,
        dropout: float = 0.0,
    ) -> None:
        self.ops, self.stream, self.width = ops, stream, width
        self.token = token_weight(f"{name}.token.weight", vocab, width, stream, std)
        self.position = None
        if context:
            self.position = stream.replicated(
                f"{name}.position.weight", (context, width), "normal"
            )
            self.position.std = std
        self.dropout = Dropout(f"{name}.dropout", dropout, ops=ops, stream=stream)

    def parameters(self) -> Iterator[Parameter]:
        yield self.token
        if self.position is not None:
            yield self.position

    def forward(self, x: Array, step: Step) -> tuple[Array, EmbeddingSaved]:
        ids = x
        first = self.token.box[0][0]
        x = self.stream.enter(self.ops.embedding_fwd(ids, self.token.data, first=first))
        if self.position is not None and step.places is not None:
            x += self.ops.embedding_fwd(self._places(x, step), self.position.data)
        elif self.position is not None:
            rows = self.stream.positions(step.positions)
            self.ops.add_positions(x, self.position.data, rows)
        x, dropout = self.dropout.forward(x, step)
        return x, EmbeddingSaved(ids, dropout, step)

    def backward_input(
        self, dy: Array, saved: EmbeddingSaved
    ) -> tuple[None, EmbeddingLeft]:
        dy, _ = self.dropout.backward_input(dy, saved.dropout)
        whole = self.stream.enter_backward(dy)
        return None, EmbeddingLeft(whole, saved.ids, dy, saved.step)

    def backward_weight(self, left: EmbeddingLeft) -> None:
        first = self.token.box[0][0]
        self.ops.embedding_dw(left.dy, left.ids, self.token.grad, first=first)
        if self.position is not None and left.step.places is not None:
            rows = self._places(left.own, left.step)
            self.ops.embedding_dw(left.own, rows, self.position.grad)
        elif self.position is not None:
            # x = E[id] + P[position]: every sequence adds to the same rows.
            rows = self.stream.positions(left.step.positions)
            self.ops.positions_dw(left.own, rows, self.position.grad)

    def _places(self, x: Array, step: Step) -> Array:
        """Places of the own tokens of the stream.   →  (b, s/u)"""
        own = self.stream.positions(step.places.T).T
        return self.ops.xp.ascontiguousarray(self.ops.xp.broadcast_to(own, x.shape[:2]))

    def cost(self, batch: int, sequence: int) -> Cost:
        tokens = batch * sequence
        full = tokens * self.width * self.ops.dtype.itemsize
        ids = 8 * tokens
        own = full // self.stream.tp.size if self.stream.is_cut else 0
        here = Cost(saved=ids, left=full + own + ids)
        return here + self.stream.enter_cost(full, full)
