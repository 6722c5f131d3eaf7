"""Llama: RMSNorm, rotary positions, SwiGLU, grouped queries, no biases
(Touvron et al. 2023)."""

from typing import Any

from mpipar.layers.mlp import SwigluMlp
from mpipar.layers.norm import RMSNorm
from mpipar.layers.rope import Rope
from mpipar.layers.stream import Stream
from mpipar.models.parts import Family
from mpipar.ops import Ops


class Llama(Family):
    """The parts of a Llama."""

    norm, bias = RMSNorm, False

    def __init__(self, model: Any, *, ops: Ops, **parts: Any) -> None:
        super().__init__(model, ops=ops, **parts)
        self.rope = Rope(model.width // model.heads, model.rope_theta, ops=ops)

    def mlp(self, name: str, ffn: int, stream: Stream, *, bias: bool) -> SwigluMlp:
        sizes = self.model.width, ffn
        return SwigluMlp(name, *sizes, ops=self.ops, stream=stream, **self.std)
