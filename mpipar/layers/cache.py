"""Keys and values of past positions, for generation."""

from typing import Any

from mpipar.ops import Ops

Array = Any


class KeyValueCache:
    """Room for the keys and values of `context` positions of every attention layer.

    Shapes   per layer two arrays (b, context, g/tp, h)
    """

    def __init__(self, context: int, *, ops: Ops) -> None:
        self.context, self.ops = context, ops
        self.length = 0
        self._arrays: dict[str, tuple[Array, Array]] = {}

    def extend(self, name: str, k: Array, v: Array) -> tuple[Array, Array]:
        """Appends k and v (b, s, g, h); returns all of that layer so far."""
        if name not in self._arrays:
            shape = (k.shape[0], self.context, *k.shape[2:])
            empty = self.ops.xp.empty
            self._arrays[name] = (empty(shape, k.dtype), empty(shape, k.dtype))
        keys, values = self._arrays[name]
        stop = self.length + k.shape[1]
        keys[:, self.length : stop] = k
        values[:, self.length : stop] = v
        return keys[:, :stop], values[:, :stop]

    def advance(self, positions: int) -> None:
        """Marks `positions` more as filled, after all layers have extended."""
        self.length += positions
