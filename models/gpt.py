"""GPT-2: LayerNorm, learned positions, GELU, biases (Radford et al. 2019)."""

from mpipar.layers.mlp import GeluMlp
from mpipar.layers.norm import LayerNorm
from mpipar.models.parts import Family


class Gpt(Family):
    """The parts of a GPT."""

    norm, bias = LayerNorm, True

    def mlp(self, name: str) -> GeluMlp:
        sizes = self.model.width, self.model.ffn
        tanh = self.model.activation == "gelu_tanh"
        return GeluMlp(name, *sizes, tanh=tanh, **self.std, **self.shared)
