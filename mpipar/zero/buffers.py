"""Buffers for units that are whole for a moment."""

from typing import Any

from mpipar.zero.flat import FlatState

Array = Any


class UnitBuffers:
    """`count` buffers of the size of the largest block, and one for each root unit, of
    the operand type.

    The root units are those of embedding and head, which are in use for longer than a
    block. Ranks that reduce or gather together reach each other's buffers.

    all    the arrays, those of the root first
    """

    def __init__(self, flat: FlatState, count: int) -> None:
        self._sizes = [unit.size for unit in flat.units]
        self.root = flat.root
        blocks = [n for i, n in enumerate(self._sizes) if i not in self.root]
        sizes = [self._sizes[index] for index in self.root]
        sizes += [max(blocks)] * min(count, len(blocks)) if blocks else []
        dtype = flat.ops.operand_dtype
        self.all = [flat.zeros(size, dtype, shared=True) for size in sizes]
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

    def of(self, index: int) -> Array:
        """The (size,) array of a unit."""
        is_root = index in self.root
        place = self.root.index(index) if is_root else self._places[index]
        return self.all[place][: self._sizes[index]]
