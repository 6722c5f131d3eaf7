"""The end of a model: final norm, projection to the vocabulary, loss."""

from collections.abc import Iterator
from typing import Any

from mpipar.comm import shares
from mpipar.errors import ShapeError
from mpipar.layers.base import Chain, Layer, Step
from mpipar.layers.loss import VocabLoss
from mpipar.layers.parameter import Parameter
from mpipar.layers.stream import Stream
from mpipar.layers.tensor.one_d import ColumnLinear
from mpipar.ops import Ops

Array = Any


class Head(Chain):
    """loss = CrossEntropy(norm(x) Wᵀ); W is the embedding's own weight where tied.

    Shapes    x (b, s/u, d)   stream layout;  W (v/tp, d), dim 0 cut over tp
    Backward, Saves, Moves, Flops   those of norm, ColumnLinear and VocabLoss
    Source    Press, Wolf 2017 (tied weights)
    """

    def __init__(
        self, norm: Layer, weight: Parameter, *, ops: Ops, stream: Stream
    ) -> None:
        self.norm, self.tp, self.is_cut = norm, stream.tp, stream.is_cut
        self.ops = ops
        self.projection = ColumnLinear(
            [weight], [], ops=ops, stream=stream, narrow=True
        )
        self.loss = VocabLoss(
            weight.box[0],
            weight.shape[0],
            ops=ops,
            tp=stream.tp,
            dtype=self.projection.result_dtype,
        )
        super().__init__([norm, self.projection, self.loss])

    def parameters(self) -> Iterator[Parameter]:
        yield from self.norm.parameters()
        yield from self.projection.parameters()

    def logits(self, x: Array, step: Step) -> Array:
        """Logits of the last position, whole on every tp rank.   (b, s, d) → (b, v)

        Raises ShapeError under sequence parallelism.
        """
        if self.is_cut:
            raise ShapeError("logits need a stream that is not cut by positions")
        h, _ = self.norm.forward(x, step)
        z, _ = self.projection.forward(h[:, -1:], step)
        counts = shares(self.loss.vocab, self.tp.size)
        return self.tp.all_gather(self.ops.wide(z[:, 0]).T, counts=counts).T
