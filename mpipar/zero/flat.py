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
    operand      (size,) the values as matrix products read them: `data` itself, or its
                 16-bit copy, made by `refresh` after every change of the values
    units        the range of each unit, in the order of the forward pass
    axis         communicator of the ranks over which gradients are summed; in host
                 memory they share the gradient buffer, so all of them make it together
    """

    def __init__(
        self,
        units: Sequence[Sequence[Parameter]],
        ops: Ops,
        axis: Any = None,
    ) -> None:
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
        self.data, self.grad = ops.zeros((self.size,)), self._zero_gradient(axis)
        self.operand = ops.operand(self.data)
        for p in self.parameters:
            lo, hi = self.range_of(p)
            p.data = self.data[lo:hi].reshape(p.local_shape)
            p.grad = self.grad[lo:hi].reshape(p.local_shape)
            p.operand = self.operand[lo:hi].reshape(p.local_shape)

    def _zero_gradient(self, axis: Any) -> Array:
        if axis is None or not self.ops.on_host:
            return self.ops.zeros((self.size,))
        return axis.shared_zeros(self.size, self.ops.dtype)

    def initialize(self, seed: int) -> None:
        """Starting values of every parameter."""
        for p in self.parameters:
            p.initialize(self.ops, seed)
        self.refresh()

    @property
    def value_bytes(self) -> int:
        """Bytes of the values and of their 16-bit copy."""
        copy = 0 if self.operand is self.data else self.operand.nbytes
        return self.data.nbytes + copy

    def refresh(self) -> None:
        """Brings `operand` up to date with `data`."""
        if self.operand is not self.data:
            self.ops.operand(self.data, out=self.operand)

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
