"""A pre-norm residual branch, of which every block has two."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpipar.layers.base import Branch, Layer, Step
from mpipar.layers.cost import Cost
from mpipar.layers.dropout import Dropout
from mpipar.layers.norm import Norm
from mpipar.layers.parameter import Parameter

Array = Any


@dataclass(slots=True)
class ResidualSaved:
    """What norm, branch and dropout saved."""

    norm: Any
    branch: Any
    dropout: Any


@dataclass(slots=True)
class ResidualLeft:
    """What the weight gradients of norm and branch need."""

    norm: Any
    branch: Any


class Residual(Layer):
    """y = x + dropout(branch(norm(x))).

    The branch adds x itself (`onto`) where nothing is dropped, and the norm adds dy to
    its gradient: the sums cost no pass of their own.

    Shapes    x, y (b, s/u, d)   stream layout
    Backward  dx = dy + norm′ᵀ(branch′ᵀ(dropout′ᵀ(dy)))
    Saves, Moves, Flops   those of its parts; told to forget, it does not save the
              norm's output, which it makes again from what the norm has saved
    Source    He et al. 2016; pre-norm order as Radford et al. 2019
    """

    def __init__(self, norm: Norm, branch: Branch, dropout: Dropout) -> None:
        self.norm, self.branch, self.dropout = norm, branch, dropout
        self.forgets = False

    def parameters(self) -> Iterator[Parameter]:
        yield from self.norm.parameters()
        yield from self.branch.parameters()

    def forward(self, x: Array, step: Step) -> tuple[Array, ResidualSaved]:
        h, norm = self.norm.forward(x, step)
        if self.dropout.is_active(step):
            h, branch = self.branch.forward(h, step)
            y, dropout = self.dropout.forward(h, step, onto=x)
        else:
            y, branch = self.branch.forward(h, step, onto=x)
            _, dropout = self.dropout.forward(y, step)
        if self.forgets:
            branch.inputs.x = None
        return y, ResidualSaved(norm, branch, dropout)

    def backward_input(
        self, dy: Array, saved: ResidualSaved
    ) -> tuple[Array, ResidualLeft]:
        if saved.branch.inputs.x is None:
            saved.branch.inputs.x = self.norm.again(saved.norm)
        d, _ = self.dropout.backward_input(dy, saved.dropout)
        d, left = self.branch.backward_input(d, saved.branch)
        dx, norm = self.norm.backward_input(d, saved.norm, onto=dy)
        return dx, ResidualLeft(norm, left)

    def backward_weight(self, left: ResidualLeft) -> None:
        self.branch.backward_weight(left.branch)
        self.norm.backward_weight(left.norm)

    def forget(self) -> None:
        self.forgets = True
        self.branch.forget()

    def cost(self, batch: int, sequence: int) -> Cost:
        parts = (self.norm, self.branch, self.dropout)
        total = sum((part.cost(batch, sequence) for part in parts), Cost())
        if self.forgets:
            total += Cost(saved=-self.norm.output_bytes(batch, sequence))
        return total
