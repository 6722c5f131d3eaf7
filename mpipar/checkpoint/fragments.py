"""What a rank holds of each parameter, as stretches of its box."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpipar.checkpoint.boxes import Box
from mpipar.layers.parameter import Parameter
from mpipar.zero.flat import Piece

Array = Any


@dataclass(frozen=True, eq=False)
class Fragment:
    """Elements begin .. end of a rank's box of a global array.

    name, shape   of the global array;  box  what the rank has of it
    arrays        (end − begin,) by kind, such as weights, m and v
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    begin: int
    end: int
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many elements."""
        return self.end - self.begin


def fragments_of(
    pieces: Sequence[Piece],
    kinds: Mapping[str, Sequence[Array]],
    *,
    share: bool = False,
) -> Iterator[Fragment]:
    """The fragments of each piece, in memory order.

    kinds   for each kind an array for each piece, as long as that
    share   of pieces that several ranks hold each takes its own part, without what
            another rank of the model owns; together they have each element once
    """
    for number, piece in enumerate(pieces):
        lo, hi = piece.share if share else (piece.begin, piece.end)
        for p, start, stop in piece.unit.places():
            begin, end = max(lo, start), min(hi, stop)
            if begin >= end or (share and not p.owner):
                continue
            own = slice(begin - piece.begin, end - piece.begin)
            arrays = {kind: held[number][own] for kind, held in kinds.items()}
            yield Fragment(p.name, p.shape, p.box, begin - start, end - start, arrays)


def whole_fragments(parameters: Sequence[Parameter]) -> list[Fragment]:
    """The boxes of bound parameters, with their values as "weights"."""
    return [
        Fragment(p.name, p.shape, p.box, 0, p.size, {"weights": p.data.reshape(-1)})
        for p in parameters
    ]
