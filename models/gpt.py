"""GPT-2: LayerNorm, learned positions, GELU, biases (Radford et al. 2019)."""

from mpipar.layers.mlp import GeluMlp
from mpipar.layers.norm import LayerNorm
from mpipar.layers.stream import Stream
from mpipar.models.parts import Family


class Gpt(Family):
    """The parts of a GPT."""

    norm, bias = LayerNorm, True

    def mlp(self, name: str, ffn: int, stream: Stream, *, bias: bool) -> GeluMlp:
        return GeluMlp(
            name,
            self.model.width,
            ffn,
            tanh=self.model.activation == "gelu_tanh",
            bias=bias,
            ops=self.ops,
            stream=stream,
            **self.std,
        )
