"""What all families share: pre-norm blocks, the head, how weights start."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from mpipar.layers.attention import CausalSelfAttention
from mpipar.layers.base import Branch, Chain, Layer
from mpipar.layers.block import Residual
from mpipar.layers.context import Core
from mpipar.layers.dropout import Dropout
from mpipar.layers.embedding import Embedding, token_weight
from mpipar.layers.head import Head
from mpipar.layers.model import Chunk, Model
from mpipar.layers.norm import LayerNorm, RMSNorm
from mpipar.layers.parameter import Parameter
from mpipar.layers.rope import Rope
from mpipar.layers.stream import Stream
from mpipar.ops import Ops

STD = 0.02


class Family:
    """Makes the parts of a model by the [model] section of a resolved recipe.

    core       how attention sees the sequence
    mixture    (family, name) → a mixture of experts, in place of the MLP of blocks from
               `dense_blocks` on; None = no block has one
    norm       the kind of its norms
    bias       whether projections have one
    rope       what tells attention the positions; None where they are learned
    """

    norm: type[LayerNorm] | type[RMSNorm]
    bias: bool
    rope: Rope | None = None

    def __init__(
        self,
        model: Any,
        *,
        ops: Ops,
        stream: Stream,
        core: Core,
        mixture: Callable[["Family", str], Layer] | None = None,
        dense_blocks: int = 0,
    ) -> None:
        self.model, self.stream, self.core, self.ops = model, stream, core, ops
        self.mixture, self.dense_blocks = mixture, dense_blocks
        self.shared = {"ops": ops, "stream": stream}
        # 2·layers branches add up in the stream, whose variance stays near that of one
        # (Radford et al. 2019, section 2.3).
        self.std = {"std": STD, "out_std": STD / math.sqrt(2 * model.layers)}

    def embedding(self) -> Embedding:
        """Where the stream begins."""
        model = self.model
        return Embedding(
            "embedding",
            model.vocab,
            model.width,
            std=STD,
            context=0 if self.rope else model.context,
            dropout=model.dropout,
            **self.shared,
        )

    def attention(self, name: str) -> Layer:
        """The attention of that name."""
        model = self.model
        return CausalSelfAttention(
            name,
            model.width,
            model.heads,
            model.kv_heads,
            bias=self.bias,
            rope=self.rope,
            dropout=model.dropout,
            window=model.window,
            core=self.core,
            **self.std,
            **self.shared,
        )

    def mlp(self, name: str, ffn: int, stream: Stream, *, bias: bool) -> Branch:
        """An MLP of that name and inner width."""
        raise NotImplementedError

    def feed_forward(self, name: str, number: int) -> Layer:
        """The MLP of a block, or the experts in its place."""
        if self.mixture is not None and number >= self.dense_blocks:
            return self.mixture(self, name)
        return self.mlp(name, self.model.ffn, self.stream, bias=self.bias)

    def block(self, number: int) -> Chain:
        """x + attention(norm1(x)), then x + mlp(norm2(x)), each branch with dropout."""
        block, parts = f"blocks.{number}", []
        branches = {
            "attention": self.attention(f"{block}.attention"),
            "mlp": self.feed_forward(f"{block}.mlp", number),
        }
        for place, (kind, branch) in enumerate(branches.items(), start=1):
            before, name = self._norm(f"{block}.norm{place}"), f"{block}.{kind}"
            dropout = Dropout(f"{name}.residual", self.model.dropout, **self.shared)
            parts.append(Residual(before, branch, dropout))
        return Chain(parts)

    def head(self, embedding: Embedding | None) -> Head:
        """The end, with the embedding's weight or one of its own.

        embedding   None where another pipeline stage has it
        """
        if not self.model.tied:
            weight = self._weight("head.weight")
        elif embedding is not None:
            weight = embedding.token
        else:
            weight = self._weight("embedding.token.weight")
            weight.owner, weight.tied = False, True
        return Head(self._norm("head.norm"), weight, **self.shared)

    def build(self, chunks: Sequence[Chunk]) -> Model:
        """These chunks of the model."""
        rows, embedding = [], None
        for blocks, first, last in chunks:
            row: list[Layer] = []
            if first:
                embedding = self.embedding()
                row.append(embedding)
            row += [self.block(number) for number in blocks]
            if last:
                row.append(self.head(embedding))
            rows.append(row)
        if embedding is not None and self.model.tied:
            embedding.token.tied = not any(chunk.last for chunk in chunks)
        return Model(rows, self.stream, self.model.width)

    def _norm(self, name: str) -> LayerNorm | RMSNorm:
        model = self.model
        return self.norm(name, model.width, eps=model.norm_eps, **self.shared)

    def _weight(self, name: str) -> Parameter:
        model = self.model
        return token_weight(name, model.vocab, model.width, self.stream, STD)
