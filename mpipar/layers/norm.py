"""LayerNorm and RMSNorm over the width of the residual stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpipar.layers.base import Layer, Step
from mpipar.layers.cost import Cost
from mpipar.layers.parameter import Parameter
from mpipar.layers.stream import Stream
from mpipar.ops import Ops

Array = Any


class Norm(Layer):
    """A layer that can add to its input gradient the one that went around its block,
    and make its output again.

    `left` has the gradients of its parameters, as `parameters` lists them: they come
    with the pass that makes dx.
    """

    ops: Ops
    stream: Stream
    width: int

    def backward_input(
        self, dy: Array, saved: Any, onto: Array | None = None
    ) -> tuple[Array, list[Array]]:
        """dx + onto, and what the parameters' gradients are to be added."""
        raise NotImplementedError

    def backward_weight(self, left: list[Array]) -> None:
        for p, sums in zip(self.parameters(), left, strict=True):
            self.ops.add_to(p.grad, sums)

    def again(self, saved: Any) -> Array:
        """The output of the forward pass, bit for bit."""
        raise NotImplementedError

    def output_bytes(self, batch: int, sequence: int) -> int:
        """Bytes of the output, as products read it."""
        items = self.stream.tokens(batch, sequence) * self.width
        return items * self.ops.operand_dtype.itemsize


@dataclass(slots=True)
class LayerNormSaved:
    """Input and statistics of a LayerNorm."""

    x: Array
    mean: Array
    rstd: Array


class LayerNorm(Norm):
    """y = (x − μ)/√(σ² + eps) · gain + bias over the last dim.

    Shapes    x, y (b, s/t, d) with t = tp under sequence parallelism, else 1
              gain, bias (d,)   same on all tp ranks
    Backward  dx as `Ops.layernorm_bwd`; dgain, dbias += Σ_tokens, which under sequence
              parallelism are summands over tp (partial)
    Saves     x, mean, rstd: b·s/t·(d + 2) items
    Moves     nothing here
    Flops     none counted
    Precision the compute type
    Source    Ba, Kiros, Hinton 2016
    """

    def __init__(
        self, name: str, width: int, *, ops: Ops, stream: Stream, eps: float
    ) -> None:
        self.ops, self.stream, self.width, self.eps = ops, stream, width, eps
        self.gain = stream.replicated(f"{name}.gain", (width,), "ones")
        self.bias = stream.replicated(f"{name}.bias", (width,), "zeros")

    def parameters(self) -> Iterator[Parameter]:
        yield self.gain
        yield self.bias

    def forward(self, x: Array, step: Step | None) -> tuple[Array, LayerNormSaved]:
        y, mean, rstd = self.ops.layernorm_fwd(
            x, self.gain.data, self.bias.data, eps=self.eps
        )
        return y, LayerNormSaved(x, mean, rstd)

    def again(self, saved: LayerNormSaved) -> Array:
        return self.forward(saved.x, None)[0]

    def backward_input(
        self, dy: Array, saved: LayerNormSaved, onto: Array | None = None
    ) -> tuple[Array, list[Array]]:
        dgain, dbias = (self.ops.zeros((self.width,)) for _ in range(2))
        dx = self.ops.layernorm_bwd(
            dy,
            saved.x,
            saved.mean,
            saved.rstd,
            self.gain.data,
            dgain=dgain,
            dbias=dbias,
            onto=onto,
        )
        return dx, [dgain, dbias]

    def cost(self, batch: int, sequence: int) -> Cost:
        tokens = self.stream.tokens(batch, sequence)
        item = self.ops.dtype.itemsize
        return Cost(saved=tokens * (self.width + 2) * item, left=2 * self.width * item)


@dataclass(slots=True)
class RMSNormSaved:
    """Input and statistic of an RMSNorm."""

    x: Array
    rstd: Array


class RMSNorm(Norm):
    """y = x/√(mean(x²) + eps) · gain over the last dim.

    Shapes    x, y (b, s/t, d) with t = tp under sequence parallelism, else 1
              gain (d,)   same on all tp ranks
    Backward  dx as `Ops.rmsnorm_bwd`; dgain += Σ_tokens, a summand over tp under
              sequence parallelism (partial)
    Saves     x, rstd: b·s/t·(d + 1) items
    Moves     nothing here
    Flops     none counted
    Precision the compute type
    Source    Zhang, Sennrich 2019
    """

    def __init__(
        self, name: str, width: int, *, ops: Ops, stream: Stream, eps: float
    ) -> None:
        self.ops, self.stream, self.width, self.eps = ops, stream, width, eps
        self.gain = stream.replicated(f"{name}.gain", (width,), "ones")

    def parameters(self) -> Iterator[Parameter]:
        yield self.gain

    def forward(self, x: Array, step: Step | None) -> tuple[Array, RMSNormSaved]:
        y, rstd = self.ops.rmsnorm_fwd(x, self.gain.data, eps=self.eps)
        return y, RMSNormSaved(x, rstd)

    def again(self, saved: RMSNormSaved) -> Array:
        return self.forward(saved.x, None)[0]

    def backward_input(
        self, dy: Array, saved: RMSNormSaved, onto: Array | None = None
    ) -> tuple[Array, list[Array]]:
        dgain = self.ops.zeros((self.width,))
        dx = self.ops.rmsnorm_bwd(
            dy,
            saved.x,
            saved.rstd,
            self.gain.data,
            dgain=dgain,
            onto=onto,
        )
        return dx, [dgain]

    def cost(self, batch: int, sequence: int) -> Cost:
        tokens = self.stream.tokens(batch, sequence)
        item = self.ops.dtype.itemsize
        return Cost(saved=tokens * (self.width + 1) * item, left=self.width * item)
