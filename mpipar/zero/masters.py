"""What a rank's optimizer updates, in the compute type."""

from typing import Any

from mpipar.zero.flat import FlatState

Array = Any


class Masters:
    """The own parts of all values: copies of 16-bit ones, else the values themselves.

    An update is smaller than what 16 bits tell apart: it must add up somewhere.

    values   `WholeValues` or `GatheredValues`
    part, parts   which part of each unit is the own one, and how many there are
    Source   Micikevicius et al. 2018, section 3.1
    """

    def __init__(self, flat: FlatState, values: Any, part: int, parts: int) -> None:
        self.flat, self.values = flat, values
        self.part, self.parts = part, parts
        self._data: Array = None
        if flat.ops.is_mixed:
            self._data = flat.ops.zeros((flat.size // parts,))

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return 0 if self._data is None else self._data.nbytes

    def own(self, index: int) -> Array:
        """This rank's part of a unit."""
        if self._data is None:
            return self.values.own(index)
        return self._data[self.flat.units[index].stretch_of_parts(self.parts)]

    def round(self) -> None:
        """Brings the own parts of 16-bit values up to date."""
        if self._data is not None:
            for index, unit in enumerate(self.flat.units):
                own = self.own(index)
                begin = self.part * len(own)
                self.flat.rounding.store(unit, begin, own, self.values.own(index))
