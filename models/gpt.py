"""GPT-2: LayerNorm, learned positions, GELU, biases (Radford et al. 2019)."""

from mpipar.layers.attention import CausalSelfAttention
from mpipar.layers.base import Layer
from mpipar.layers.embedding import Embedding
from mpipar.layers.mlp import GeluMlp
from mpipar.layers.norm import LayerNorm
from mpipar.models.parts import STD, Family


class Gpt(Family):
    """The parts of a GPT."""

    norm = LayerNorm

    def embedding(self) -> Embedding:
        model = self.model
        return Embedding(
            "embedding",
            model.vocab,
            model.width,
            std=STD,
            context=model.context,
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
            bias=True,
            dropout=model.dropout,
            **self.std,
            **self.shared,
        )
        tanh = model.activation == "gelu_tanh"
        sizes = model.width, model.ffn
        return attention, GeluMlp(
            f"{name}.mlp", *sizes, tanh=tanh, **self.std, **self.shared
        )
