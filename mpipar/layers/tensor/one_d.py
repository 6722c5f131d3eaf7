"""Dense layers cut in one dimension: by rows of W (outputs) or by columns (inputs)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpipar.layers.base import Branch, Layer, Step
from mpipar.layers.cost import Cost
from mpipar.layers.parameter import Interval, Parameter, Stack, cut
from mpipar.layers.stream import Stream
from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class LinearSaved:
    """Input of a dense layer, as the stream holds it, of the operand type."""

    x: Array


@dataclass(slots=True)
class LinearLeft:
    """What the weight gradient of a dense layer needs, of the operand type; db where
    the bias does not see all of dy."""

    dy: Array
    x: Array
    db: Array = None


@dataclass(frozen=True)
class Output:
    """One global tensor of a column-cut layer: its rows and who holds which.

    rows      global number of rows;  held  this rank's interval of them
    partial   axis over which copies of the same rows are summed, "" if none
    """

    name: str
    rows: int
    held: Interval
    partial: str = ""
    owner: bool = True


def even_output(name: str, rows: int, tp: Any) -> Output:
    """Rows cut evenly over tp."""
    return Output(name, rows, cut(rows, tp.size, tp.rank))


class ColumnLinear(Layer):
    """y = x Wᵀ + b, with W cut by rows over tp; several outputs share one product.

    An operand item is what products read: 16-bit in mixed precision, else as all.

    Shapes    x (b, s/u, d)    stream layout; u = tp under sequence parallelism, else 1
              W (f/tp, d)      parameters stacked by rows, dim 0 cut over tp
              y (b, s, f/tp)
    Backward  dx  = Σ_tp dy W          stream layout, in backward_input
              dW += Σ_bs dyᵀ x         (f/tp, d)     local, may be deferred
              db += Σ_bs dy            (f/tp,)
    Saves     x: b·s/u·d operand items. `left` holds dy and the whole x
    Moves     R: forward 0; backward all-reduce 2·(tp−1)/tp · b·s·d items
              S(1): forward all-gather, backward all-gather (x again, for dW), of
              operand items, and reduce-scatter, (tp−1)/tp · b·s·d items each
    Flops     forward 2·b·s·d·f/tp; input and weight gradients the same each
    Precision operands as above, sums and results in the compute type, see `narrow`
    Source    Shoeybi et al. 2019, section 3, operator f

    narrow    True where what reads y takes operands: then y is one, if the ops want it
    """

    def __init__(
        self,
        weights: Sequence[Parameter],
        biases: Sequence[Parameter],
        *,
        ops: Ops,
        stream: Stream,
        narrow: bool = False,
    ) -> None:
        self.ops, self.stream = ops, stream
        self.narrow = narrow and ops.narrow_results
        self.weight = Stack(weights)
        self.bias = Stack(biases) if biases else None

    @classmethod
    def build(
        cls,
        outputs: Sequence[Output],
        width: int,
        *,
        std: float,
        bias: bool,
        ops: Ops,
        stream: Stream,
        narrow: bool = False,
    ) -> "ColumnLinear":
        """A layer with new parameters NAME.weight (and NAME.bias) for each output."""
        weights, biases = [], []
        for o in outputs:
            shared = {"partial": o.partial, "owner": o.owner}
            box = (o.held, (0, width))
            weights.append(
                Parameter(
                    f"{o.name}.weight", (o.rows, width), box, "normal", std, **shared
                )
            )
            if bias:
                biases.append(
                    Parameter(f"{o.name}.bias", (o.rows,), (o.held,), "zeros", **shared)
                )
        return cls(weights, biases, ops=ops, stream=stream, narrow=narrow)

    @property
    def result_dtype(self) -> np.dtype:
        """Type of y."""
        return self.ops.operand_dtype if self.narrow else self.ops.dtype

    def parameters(self) -> Iterator[Parameter]:
        yield from self.weight.parts
        if self.bias is not None:
            yield from self.bias.parts

    def forward(self, x: Array, step: Step) -> tuple[Array, LinearSaved]:
        return self.through(partial(self.ops.linear_fwd, narrow=self.narrow), x)

    def through(self, product: Callable[..., Any], x: Array) -> tuple[Any, LinearSaved]:
        """What product(x, W, b) gives, and what `backward_input` needs."""
        bias = None if self.bias is None else self.bias.data
        x = self.ops.operand(x)
        return product(self.stream.leave(x), self.weight.data, bias), LinearSaved(x)

    def backward_input(self, dy: Array, saved: LinearSaved) -> tuple[Array, LinearLeft]:
        x, dy = self.stream.leave(saved.x), self.ops.operand(dy)
        dx = self.stream.leave_backward(self.ops.linear_dx(dy, self.weight.data))
        return dx, LinearLeft(dy, x)

    def backward_weight(self, left: LinearLeft) -> None:
        self.ops.linear_dw(left.dy, left.x, self.weight.grad)
        if self.bias is not None:
            self.ops.linear_db(left.dy, self.bias.grad)

    def cost(self, batch: int, sequence: int) -> Cost:
        width, item = self.weight.parts[0].shape[1], self.ops.operand_dtype.itemsize
        there = batch * sequence * width * item
        back = batch * sequence * width * self.ops.dtype.itemsize
        rows = self.weight.rows
        here = Cost(
            flops=2 * batch * sequence * width * rows,
            saved=self.stream.tokens(batch, sequence) * width * item,
            left=batch * sequence * (rows + width) * item,
        )
        moved = self.stream.leave_cost(there, back) + self.stream.again_cost(there)
        return here + moved


class RowLinear(Branch):
    """y = Σ_tp x Wᵀ + b, with W cut by columns over tp; b is added once, after the sum.

    Shapes    x (b, s, f/tp)
              W (d, f/tp)      parameter, dim 1 cut over tp;  b (d,) on all tp ranks
              y (b, s/u, d)    stream layout; u = tp under sequence parallelism, else 1
    Backward  dx  = dy W               (b, s, f/tp)
              dW += Σ_bs dyᵀ x         (d, f/tp)     local, may be deferred
              db += Σ_bs dy            (d,)   over the rank's own stream tokens
    Saves     x: b·s·f/tp operand items. `left` holds dy of all tokens and x
    Moves     R: forward all-reduce 2·(tp−1)/tp · b·s·d items; backward 0
              S(1): forward reduce-scatter, backward all-gather (operand items),
              (tp−1)/tp · b·s·d each
    Flops     forward 2·b·s·d·f/tp; input and weight gradients the same each
    Precision operands as above, sums and results in the compute type, see `narrow`
    Source    Shoeybi et al. 2019, section 3, operator g

    narrow    True where what made x takes its gradient as an operand: then dx is one,
              if the ops want it
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        width: int,
        *,
        std: float,
        bias: bool,
        ops: Ops,
        stream: Stream,
        narrow: bool = False,
    ) -> None:
        self.ops, self.stream, tp = ops, stream, stream.tp
        self.narrow = narrow and ops.narrow_results
        self.weight = Parameter(
            f"{name}.weight",
            (width, inputs),
            ((0, width), cut(inputs, tp.size, tp.rank)),
            "normal",
            std,
        )
        self.bias = None
        if bias:
            self.bias = stream.replicated(f"{name}.bias", (width,), "zeros")

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def forward(
        self, x: Array, step: Step, onto: Array | None = None
    ) -> tuple[Array, LinearSaved]:
        bias = None if self.bias is None else self.bias.data
        x = self.ops.operand(x)
        if self.stream.tp.size == 1:
            y = self.ops.linear_fwd(x, self.weight.data, bias, onto)
        else:
            y = self.stream.enter(self.ops.linear_fwd(x, self.weight.data))
            y = self.ops.add_residual(y, bias, onto)
        return y, LinearSaved(x)

    def backward_input(self, dy: Array, saved: LinearSaved) -> tuple[Array, LinearLeft]:
        product = partial(self.ops.linear_dx, narrow=self.narrow)
        return self.backward_through(product, dy, saved)

    def backward_through(
        self, product: Callable[..., Array], dy: Array, saved: LinearSaved
    ) -> tuple[Array, LinearLeft]:
        """What product(dy, W) gives, and what `backward_weight` needs."""
        dy, db = self.ops.operand(dy), None
        if self.bias is not None:
            # y = stream tokens + b: the bias sees this rank's own tokens only.
            db = self.ops.zeros(self.bias.local_shape)
            self.ops.linear_db(dy, db)
        dy = self.stream.enter_backward(dy)
        return product(dy, self.weight.data), LinearLeft(dy, saved.x, db)

    def backward_weight(self, left: LinearLeft) -> None:
        self.ops.linear_dw(left.dy, left.x, self.weight.grad)
        if self.bias is not None:
            self.ops.add_to(self.bias.grad, left.db)

    def cost(self, batch: int, sequence: int) -> Cost:
        (width, inputs), item = self.weight.local_shape, self.ops.operand_dtype.itemsize
        tokens = batch * sequence
        bias = 0 if self.bias is None else width * self.ops.dtype.itemsize
        here = Cost(
            flops=2 * tokens * width * inputs,
            saved=tokens * inputs * item,
            left=tokens * (width + inputs) * item + bias,
        )
        there = tokens * width * self.ops.dtype.itemsize
        return here + self.stream.enter_cost(there, tokens * width * item)
