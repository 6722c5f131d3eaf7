"""The feed-forward part of a block, its inner width cut over tp."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpipar.layers.base import Branch, Step
from mpipar.layers.cost import Cost
from mpipar.layers.parameter import Parameter
from mpipar.layers.stream import Stream
from mpipar.layers.tensor.one_d import (
    ColumnLinear,
    LinearLeft,
    LinearSaved,
    RowLinear,
    even_output,
)
from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class MlpSaved:
    """Inputs of both projections and what the activation's backward needs."""

    inputs: LinearSaved
    activation: Array
    outputs: LinearSaved


@dataclass(slots=True)
class MlpLeft:
    """What the weight gradients of both projections need."""

    inputs: Any
    outputs: Any


class _Mlp(Branch):
    """Two projections around an activation; subclasses give the activation.

    activate(u) -> y, kept            u (b, s, columns of the first projection)
    activate_backward(dy, kept) -> du may overwrite dy
    project(x, step) -> y, kept, saved          the first projection and the activation
    project_backward(dy, saved) -> du, left     of the second one and the activation
    The activation keeps as many items a token as the first projection has columns, of
    the type that `kept_dtype` says. Told to forget, the layer saves u instead of those
    and of the second projection's input, and makes both again.
    """

    forgets = False

    def __init__(
        self,
        name: str,
        parts: Sequence[str],
        width: int,
        ffn: int,
        *,
        ops: Ops,
        stream: Stream,
        std: float,
        out_std: float,
        bias: bool,
    ) -> None:
        self.ops = ops
        shared = {"ops": ops, "stream": stream, "bias": bias, "narrow": True}
        outputs = [even_output(f"{name}.{part}", ffn, stream.tp) for part in parts]
        self.inputs = ColumnLinear.build(outputs, width, std=std, **shared)
        self.outputs = RowLinear(f"{name}.down", ffn, width, std=out_std, **shared)

    @property
    def kept_dtype(self) -> np.dtype:
        """Type of what the activation keeps."""
        raise NotImplementedError

    def activate(self, u: Array) -> tuple[Array, Array]:
        """The activation, and what its backward needs."""
        raise NotImplementedError

    def activate_backward(self, dy: Array, kept: Array) -> Array:
        """Gradient of the activation's input."""
        raise NotImplementedError

    def parameters(self) -> Iterator[Parameter]:
        yield from self.inputs.parameters()
        yield from self.outputs.parameters()

    def project(self, x: Array, step: Step) -> tuple[Array, Array, LinearSaved]:
        """The activation's output, what its backward needs, and the saved input."""
        u, inputs = self.inputs.forward(x, step)
        return *self.activate(u), inputs

    def project_backward(self, dy: Array, saved: MlpSaved) -> tuple[Array, LinearLeft]:
        """Gradient of the activation's input, and what dW of the second one needs."""
        dy, outputs = self.outputs.backward_input(dy, saved.outputs)
        return self.activate_backward(dy, saved.activation), outputs

    def forward(
        self, x: Array, step: Step, onto: Array | None = None
    ) -> tuple[Array, MlpSaved]:
        if self.forgets:
            kept, inputs = self.inputs.forward(x, step)
            y, _ = self.activate(kept)
        else:
            y, kept, inputs = self.project(x, step)
        y, outputs = self.outputs.forward(y, step, onto)
        if self.forgets:
            outputs.x = None
        return y, MlpSaved(inputs, kept, outputs)

    def backward_input(self, dy: Array, saved: MlpSaved) -> tuple[Array, MlpLeft]:
        if saved.outputs.x is None:
            y, saved.activation = self.activate(saved.activation)
            saved.outputs.x = self.ops.operand(y)
            du, outputs = _Mlp.project_backward(self, dy, saved)
        else:
            du, outputs = self.project_backward(dy, saved)
        dx, inputs = self.inputs.backward_input(du, saved.inputs)
        return dx, MlpLeft(inputs, outputs)

    def backward_weight(self, left: MlpLeft) -> None:
        self.outputs.backward_weight(left.outputs)
        self.inputs.backward_weight(left.inputs)

    def forget(self) -> None:
        self.forgets = True

    def cost(self, batch: int, sequence: int) -> Cost:
        tokens = batch * sequence
        dtype = self.inputs.result_dtype if self.forgets else self.kept_dtype
        kept = tokens * self.inputs.weight.rows * dtype.itemsize
        if self.forgets:
            width = self.outputs.weight.local_shape[1]
            kept -= tokens * width * self.ops.operand_dtype.itemsize
        projections = self.inputs.cost(batch, sequence)
        return Cost(saved=kept) + projections + self.outputs.cost(batch, sequence)


class GeluMlp(_Mlp):
    """y = GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, inner width f cut over tp.

    Shapes    x, y (b, s/u, d)   stream layout;  inner (b, s, f/tp)
    Backward  as the projections, with du = dy·GELU′(u)
    Saves     x, the slope GELU′(u) or u, GELU(u): b·s/u·d + 2·b·s·f/tp operand items
    Moves     as ColumnLinear plus RowLinear
    Flops     4·b·s·d·f/tp
    Precision the compute type
    Source    Vaswani et al. 2017, section 3.3; Hendrycks, Gimpel 2016
    """

    def __init__(
        self,
        name: str,
        width: int,
        ffn: int,
        *,
        ops: Ops,
        stream: Stream,
        std: float,
        out_std: float,
        tanh: bool,
        bias: bool = True,
    ) -> None:
        shared = {"ops": ops, "stream": stream, "std": std, "out_std": out_std}
        super().__init__(name, ["up"], width, ffn, bias=bias, **shared)
        self.tanh = tanh

    @property
    def kept_dtype(self) -> np.dtype:
        return self.ops.operand_dtype

    def activate(self, u: Array) -> tuple[Array, Array]:
        return self.ops.gelu_fwd(u, tanh=self.tanh)

    def activate_backward(self, dy: Array, kept: Array) -> Array:
        return self.ops.gelu_dx(dy, kept)

    def project(self, x: Array, step: Step) -> tuple[Array, Array, LinearSaved]:
        product = partial(self.ops.linear_gelu_fwd, tanh=self.tanh)
        (y, kept), inputs = self.inputs.through(product, x)
        return y, kept, inputs

    def project_backward(self, dy: Array, saved: MlpSaved) -> tuple[Array, LinearLeft]:
        product = partial(
            self.ops.linear_gelu_dx, kept=saved.activation, tanh=self.tanh
        )
        return self.outputs.backward_through(product, dy, saved.outputs)


class SwigluMlp(_Mlp):
    """y = (SiLU(x Wgᵀ) · x Wuᵀ) Wdᵀ, inner width f cut over tp, no biases.

    Shapes    x, y (b, s/u, d)   stream layout;  inner (b, s, f/tp)
    Backward  as the projections, with dgate and dup as `Ops.swiglu_dx`
    Saves     x and the product, b·s/u·d + b·s·f/tp operand items; gate and up
    Moves     as ColumnLinear plus RowLinear
    Flops     6·b·s·d·f/tp
    Precision the compute type
    Source    Shazeer 2020
    """

    def __init__(
        self,
        name: str,
        width: int,
        ffn: int,
        *,
        ops: Ops,
        stream: Stream,
        std: float,
        out_std: float,
    ) -> None:
        shared = {"ops": ops, "stream": stream, "std": std, "out_std": out_std}
        super().__init__(name, ["gate", "up"], width, ffn, bias=False, **shared)

    @property
    def kept_dtype(self) -> np.dtype:
        return self.inputs.result_dtype

    def activate(self, u: Array) -> tuple[Array, Array]:
        gate, up = self._halves(u)
        return self.ops.swiglu_fwd(gate, up), u

    def activate_backward(self, dy: Array, kept: Array) -> Array:
        du = self.ops.empty_operand(kept.shape)
        (gate, up), (dgate, dup) = self._halves(kept), self._halves(du)
        self.ops.swiglu_dx(dy, gate, up, dgate=dgate, dup=dup)
        return du

    def _halves(self, u: Array) -> tuple[Array, Array]:
        half = u.shape[-1] // 2
        return u[..., :half], u[..., half:]
