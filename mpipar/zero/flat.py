"""All parameters of a rank in one flat buffer, and their gradients in another."""

from collections.abc import Iterator, Sequence
from typing import Any

from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops

Array = Any
Range = tuple[int, int]


class FlatState:
    """One buffer for values and one for gradients; parameters are views of them.

    data, grad   (size,) in the compute type
    units        the range of each unit, in the order of the forward pass
    """

    def __init__(self, units: Sequence[Sequence[Parameter]], ops: Ops) -> None:
        self.ops = ops
        self.parameters: list[Parameter] = [p for unit in units for p in unit]
        self.units: list[Range] = []
        self._start: dict[int, int] = {}
        self.size = 0
        for unit in units:
            begin = self.size
            for p in unit:
                self._start[id(p)] = self.size
                self.size += p.size
            self.units.append((begin, self.size))
        self.data, self.grad = ops.zeros((self.size,)), ops.zeros((self.size,))
        for p in self.parameters:
            lo, hi = self.range_of(p)
            p.data = self.data[lo:hi].reshape(p.local_shape)
            p.grad = self.grad[lo:hi].reshape(p.local_shape)

    def initialize(self, seed: int) -> None:
        """Starting values of every parameter."""
        for p in self.parameters:
            p.initialize(self.ops, seed)

    def range_of(self, p: Parameter) -> Range:
        """Where a parameter lies in the flat buffers."""
        start = self._start[id(p)]
        return start, start + p.size

    def ranges(self, key: Any) -> Iterator[tuple[Any, int, int]]:
        """Longest runs of neighbouring parameters with the same key(parameter)."""
        lo = hi = 0
        current: Any = None
        for p in self.parameters:
            if key(p) != current and hi > lo:
                yield current, lo, hi
                lo = hi
            current = key(p)
            hi += p.size
        if hi > lo:
            yield current, lo, hi
