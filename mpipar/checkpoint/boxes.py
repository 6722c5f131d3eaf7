"""Boxes of arrays, and stretches of their elements in row-major order."""

import random
from collections.abc import Iterable, Iterator, Sequence
from math import prod

Interval = tuple[int, int]
# A half-open interval in each dim of a global array
Box = tuple[Interval, ...]


def lengths(box: Sequence[Interval]) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(hi - lo for lo, hi in box)


def elements(box: Sequence[Interval]) -> int:
    """How many elements a box has."""
    return prod(lengths(box))


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> Box | None:
    """The box that two boxes share; None where they share nothing."""
    both = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)
    )
    return both if all(lo < hi for lo, hi in both) else None


def within(inner: Sequence[Interval], outer: Sequence[Interval]) -> tuple[slice, ...]:
    """Where a box lies in an array of a box around it."""
    return tuple(
        slice(lo - start, hi - start)
        for (lo, hi), (start, _) in zip(inner, outer, strict=True)
    )


class Measure:
    """Tells whether boxes cover others once: only then have both the same sum.

    Random numbers stand for the places of each dim; an interval measures the difference
    of its ends', a box the product of its intervals. It errs once in 2⁵⁵ times.
    """

    _PRIME = 2**61 - 1

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, boxes: Iterable[Sequence[Interval]]) -> int:
        """The sum over the boxes."""
        return sum(
            prod(
                self._at(dim, hi) - self._at(dim, lo) for dim, (lo, hi) in enumerate(b)
            )
            for b in boxes
        )

    def are_equal(self, one: int, other: int) -> bool:
        """True for sums that are the same."""
        return (one - other) % self._PRIME == 0

    def _at(self, dim: int, place: int) -> int:
        if (dim, place) not in self._numbers:
            self._numbers[dim, place] = random.randrange(self._PRIME)
        return self._numbers[dim, place]


def boxes_of(box: Box, begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """Elements begin .. end of a box as boxes, each of which is contiguous there.

    Yields (place among the elements, box), in order; at most 2·dims − 1 of them: the
    rest of a row, whole rows, the beginning of a row, and so on inside of the rows.
    """
    if begin >= end:
        return
    if len(box) == 1:
        lo, _ = box[0]
        yield begin, ((lo + begin, lo + end),)
        return
    (start, _), inside = box[0], box[1:]
    row = elements(inside)
    first, last = -(-begin // row), end // row
    if first > last:
        yield from _in_row(box, last, begin, end)
        return
    yield from _in_row(box, first - 1, begin, first * row)
    if first < last:
        yield first * row, ((start + first, start + last), *inside)
    yield from _in_row(box, last, last * row, end)


def _in_row(box: Box, row: int, begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """Elements begin .. end, all of them in one row of the box."""
    lo, inside = box[0][0] + row, box[1:]
    skipped = row * elements(inside)
    for place, part in boxes_of(inside, begin - skipped, end - skipped):
        yield skipped + place, ((lo, lo + 1), *part)
