"""One layer by itself on one rank: a mixture of experts, or dense work of its FLOPs."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from mpipar.comm import NullCommunicator
from mpipar.config import Experts, Model
from mpipar.layers.base import Branch, Step
from mpipar.layers.expert import ExpertCut
from mpipar.layers.stream import Stream
from mpipar.models.llama import Llama
from mpipar.models.mixtral import mixtures
from mpipar.ops import make_ops
from mpipar.zero.flat import FlatState


class _LayerWork:
    """A layer with weights, and rows (1, rows, width) to run it on.

    make(family) → the layer
    """

    def __init__(self, make: Callable[[Llama], Branch], rows: int, width: int) -> None:
        ops = make_ops("cpu", "fp32")
        model = Model(family="llama", layers=1, width=width, heads=1, context=rows)
        stream = Stream(NullCommunicator("tp"), sequence=False)
        self.layer = make(Llama(model, ops=ops, stream=stream, core=None))
        self.flat = FlatState([list(self.layer.parameters())], ops)
        self.flat.initialize(0)
        self.step = Step(positions=np.arange(rows), samples=np.arange(1))
        rng = np.random.default_rng(0)
        self.x, self.dy = rng.standard_normal((2, 1, rows, width), np.float32)

    def seconds(self) -> float:
        """Of a forward and a backward pass, weight gradients included."""
        began = time.perf_counter()
        _, saved = self.layer.forward(self.x, self.step)
        self.layer.backward(self.dy, saved)
        return time.perf_counter() - began


class DenseWork(_LayerWork):
    """One MLP of an expert's inner width, with a row for every choice of a token."""

    def __init__(self, experts: Experts, tokens: int, width: int) -> None:
        def make(family: Llama) -> Branch:
            return family.mlp("mlp", experts.ffn, family.stream, bias=False)

        super().__init__(make, tokens * experts.active, width)


class MixtureWork(_LayerWork):
    """A mixture of experts.

    outside   seconds of every pass that were not spent in an expert: routing, moving
              rows, and adding them up
    """

    def __init__(self, experts: Experts, tokens: int, width: int) -> None:
        cut = ExpertCut(NullCommunicator("ep"))
        make = mixtures(experts, cut)
        super().__init__(lambda family: make(family, "mlp"), tokens, width)
        self._inside, self.outside = 0.0, []
        for expert in self.layer.experts:
            for name in ("forward", "backward_input", "backward_weight"):
                setattr(expert, name, self._timed(getattr(expert, name)))

    def seconds(self) -> float:
        self._inside = 0.0
        spent = super().seconds()
        self.outside.append(spent - self._inside)
        return spent

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = method(*args)
            self._inside += time.perf_counter() - began
            return result

        return timed
