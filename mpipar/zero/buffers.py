"""Buffers for units that are whole for a moment."""

from typing import Any

from mpipar.zero.flat import FlatState

Array = Any


class UnitBuffers:
    """`count` buffers of the size of the largest block, and one for each root unit.

    The root is the first and the last unit: embedding and head, which may share a
    weight and are in use for longer than a block. Ranks that reduce or gather together
    reach each other's buffers.

    all    the arrays, in the order that `place` counts them
    root   indices of the root units
    """

    def __init__(self, flat: FlatState, count: int) -> None:
        self._sizes = [unit.size for unit in flat.units]
        self.root = sorted({0, len(self._sizes) - 1})
        blocks = self._sizes[1:-1]
        sizes = [self._sizes[index] for index in self.root]
        sizes += [max(blocks)] * min(count, len(blocks)) if blocks else []
        self.all = [flat.zeros(size, shared=True) for size in sizes]
        # The place of every block that has one, least recently used first
        self._places: dict[int, int] = {}
        self._free = list(range(len(self.root), len(self.all)))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.all)

    @property
    def blocks(self) -> list[int]:
        """Blocks that have a buffer, least recently used first."""
        return list(self._places)

    @property
    def is_full(self) -> bool:
        """True where no block can be added."""
        return not self._free

    def add(self, index: int) -> None:
        """Gives a block a buffer."""
        self._places[index] = self._free.pop()

    def drop(self, index: int) -> None:
        """Takes the buffer from a block; a root unit keeps its own."""
        if index in self._places:
            self._free.append(self._places.pop(index))

    def use(self, index: int) -> None:
        """Notes that a block was used just now."""
        if index in self._places:
            self._places[index] = self._places.pop(index)

    def place(self, index: int) -> int:
        """Which of `all` a unit has."""
        if index in self.root:
            return self.root.index(index)
        return self._places[index]

    def of(self, index: int) -> Array:
        """The (size,) array of a unit."""
        return self.all[self.place(index)][: self._sizes[index]]
