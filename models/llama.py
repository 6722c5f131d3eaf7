"""Llama: RMSNorm, rotary positions, SwiGLU, grouped queries, no biases
(Touvron et al. 2023)."""

from typing import Any

from mpipar.layers.attention import CausalSelfAttention
from mpipar.layers.base import Layer
from mpipar.layers.embedding import Embedding
from mpipar.layers.mlp import SwigluMlp
from mpipar.layers.norm import RMSNorm
from mpipar.layers.rope import Rope
from mpipar.layers.stream import Stream
from mpipar.models.parts import STD, Family
from mpipar.ops import Ops


class Llama(Family):
    """The parts of a Llama."""

    norm = RMSNorm

    def __init__(self, model: Any, *, ops: Ops, stream: Stream) -> None:
        super().__init__(model, ops=ops, stream=stream)
        self.rope = Rope(model.width // model.heads, model.rope_theta, ops=ops)

    def embedding(self) -> Embedding:
        model = self.model
        return Embedding(
            "embedding",
            model.vocab,
            model.width,
            std=STD,
            dropout=model.dropout,
            **self.shared,
        )

    def branches(self, name: str) -> tuple[Layer, Layer]:
        model = self.model
        attention = CausalSelfAttention(
            f"{name}.attention",
            model.width,
            model.heads,
            model.kv_heads,
            bias=False,
            rope=self.rope,
            dropout=model.dropout,
            **self.std,
            **self.shared,
        )
        sizes = model.width, model.ffn
        return attention, SwigluMlp(f"{name}.mlp", *sizes, **self.std, **self.shared)
