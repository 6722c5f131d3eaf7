"""All parameters of a rank in one index space, unit after unit, and their arrays."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops
from mpipar.zero.rounding import Rounding

Array = Any
Run = tuple[Any, int, int]


class Unit:
    """The parameters of one unit, one after another, then padding.

    begin   where it lies in the index space of the model;  size  with its padding, a
            multiple of what it is cut into;  filled  without
    """

    def __init__(
        self, parameters: Sequence[Parameter], begin: int, multiple: int
    ) -> None:
        self.parameters, self.begin = list(parameters), begin
        self.filled = sum(p.size for p in parameters)
        self.size = -(-self.filled // multiple) * multiple

    @property
    def is_tied(self) -> bool:
        """True where another pipeline stage has a summand of its gradient."""
        return any(p.tied for p in self.parameters)

    @property
    def stretch(self) -> slice:
        """Where it lies in arrays of the whole model."""
        return slice(self.begin, self.begin + self.size)

    def stretch_of_parts(self, parts: int) -> slice:
        """Where one of its equal parts lies in arrays of such a part of the model."""
        return slice(self.begin // parts, (self.begin + self.size) // parts)

    def bind_values(self, data: Array) -> None:
        """Makes its parameters views of a (size,) array; None takes it away."""
        for p, lo, hi in self.places():
            p.data = None if data is None else data[lo:hi].reshape(p.local_shape)

    def bind_gradients(self, grad: Array) -> None:
        """Makes their gradients views of a (size,) array; None takes it away."""
        for p, lo, hi in self.places():
            p.grad = None if grad is None else grad[lo:hi].reshape(p.local_shape)

    def places(self) -> Iterator[tuple[Parameter, int, int]]:
        """Each parameter and where it lies in the unit."""
        lo = 0
        for p in self.parameters:
            yield p, lo, lo + p.size
            lo += p.size

    def runs(
        self, key: Callable[[Parameter], Any], begin: int, end: int
    ) -> Iterator[Run]:
        """Longest runs of neighbours with the same key in begin .. end of the unit.

        Padding is in none of them.
        """
        lo = hi = 0
        current: Any = None
        for p, start, stop in [*self.places(), (None, self.filled, self.filled)]:
            value = None if p is None else key(p)
            if p is None or value != current:
                if max(lo, begin) < min(hi, end):
                    yield current, max(lo, begin), min(hi, end)
                lo, current = start, value
            hi = stop


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of a unit that this rank's optimizer updates.

    begin, end   in the unit
    data, grad   (end − begin,) values in the compute type, summed gradients
    part, parts  how many ranks update the same stretch, and which of them this one is
    rounded      16-bit values that are those of `data`, rounded to the nearest; None
                 where there are none
    """

    unit: Unit
    begin: int
    end: int
    data: Array
    grad: Array
    part: int = 0
    parts: int = 1
    rounded: Array = None

    @property
    def share(self) -> tuple[int, int]:
        """Begin and end in the unit of what this rank counts and saves for all that
        update the same."""
        size = self.end - self.begin
        lo, hi = (size * i // self.parts for i in (self.part, self.part + 1))
        return self.begin + lo, self.begin + hi


class FlatState:
    """One buffer for values and one for gradients; parameters are views of them.

    data    (size,) in the operand type; None where no rank holds them whole
    grad    (size,) in `grad_dtype`; None likewise
    units   in the order of the forward pass
    root    those of embedding and head

    axis         ranks whose buffers are reduced or gathered together: in host memory
                 they share them, so all of them make it together
    multiple     that every unit is padded to
    values, gradients   False where they are not held whole
    grad_dtype   of summed gradients; by itself the operand type
    rounding     of values; by itself to the nearest
    """

    def __init__(
        self,
        units: Sequence[Sequence[Parameter]],
        ops: Ops,
        axis: Any = None,
        *,
        root: Sequence[int] = (),
        multiple: int = 1,
        values: bool = True,
        gradients: bool = True,
        grad_dtype: np.dtype | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.ops, self.axis, self.root = ops, axis, list(root)
        self.rounding = rounding or Rounding(ops)
        self.grad_dtype = grad_dtype or ops.operand_dtype
        self.parameters: list[Parameter] = [p for unit in units for p in unit]
        self.units: list[Unit] = []
        self.size = 0
        for parameters in units:
            self.units.append(Unit(parameters, self.size, multiple))
            self.size += self.units[-1].size
        self.data = self.grad = None
        if values:
            # Padded, it is gathered; else nobody else reads it.
            shared = multiple > 1
            self.data = self.zeros(self.size, ops.operand_dtype, shared=shared)
        if gradients:
            self.grad = self.zeros(self.size, self.grad_dtype, shared=True)
        for unit in self.units:
            if values:
                unit.bind_values(self.data[unit.stretch])
            if gradients:
                unit.bind_gradients(self.grad[unit.stretch])

    def zeros(self, size: int, dtype: np.dtype, *, shared: bool) -> Array:
        """(size,) zeros; where `shared`, the ranks of the axis reach each other's."""
        if not shared or self.axis is None or not self.ops.on_host:
            return self.ops.xp.zeros(size, dtype)
        return self.axis.shared_zeros(size, dtype)

    def initialize(self, seed: int) -> None:
        """Starting values of every parameter."""
        for p in self.parameters:
            p.initialize(self.ops, seed)
