"""Dropout whose mask is a function of seed, site, step and global position."""

from dataclasses import dataclass
from typing import Any

from mpipar.layers.base import Layer, Step
from mpipar.layers.cost import Cost
from mpipar.layers.stream import Stream
from mpipar.ops import Ops
from mpipar.ops.philox import stream_key

Array = Any


@dataclass(slots=True)
class DropoutSaved:
    """The micro-batch whose mask was applied; the mask itself is drawn again."""

    step: Step


class Dropout(Layer):
    """y = x·m (+ onto), m = 1/(1 − rate) where kept and 0 where dropped.

    The mask of element (sample, position, column) is drawn by Philox from (seed, name,
    step number, sample, position, column): equal in every layout, also if drawn again.
    Where nothing is dropped, y is x itself, and `onto` may not be given.

    Shapes    x, y (b, s/u, d)   stream layout; u = tp if it cuts positions, else 1
    Backward  dx = dy·m
    Saves     nothing
    Moves     nothing
    Flops     none counted
    Source    Srivastava et al. 2014; inverted form
    """

    def __init__(self, name: str, rate: float, *, ops: Ops, stream: Stream) -> None:
        self.name, self.rate, self.ops, self.stream = name, rate, ops, stream

    def forward(
        self, x: Array, step: Step, onto: Array | None = None
    ) -> tuple[Array, DropoutSaved]:
        return self._apply(x, step, onto), DropoutSaved(step)

    def backward_input(self, dy: Array, saved: DropoutSaved) -> tuple[Array, None]:
        return self._apply(dy, saved.step, None), None

    def cost(self, batch: int, sequence: int) -> Cost:
        return Cost()

    def is_active(self, step: Step) -> bool:
        """True where elements are dropped."""
        return bool(self.rate) and step.training

    def _apply(self, x: Array, step: Step, onto: Array | None) -> Array:
        if not self.is_active(step):
            return x
        positions = self.stream.positions(step.positions)
        rows = positions, step.samples, step.number
        key = stream_key(step.seed, self.name)
        return self.ops.dropout(x, self.rate, rows, key, onto=onto)
