"""Boxes of arrays, held against NumPy's own indices for every small shape."""

from itertools import product

import numpy as np
import pytest

from mpipar.checkpoint.boxes import (
    Box,
    Measure,
    boxes_of,
    elements,
    intersection,
    lengths,
    within,
)

SHAPES = [s for dims in (1, 2, 3, 4) for s in product((1, 2, 3), repeat=dims)]
SHAPES += [(1, 7), (5, 1), (7, 3, 2), (2, 1, 5), (4, 3, 1, 2)]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


@pytest.mark.parametrize("origin", [0, 5])
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_every_stretch_of_every_box_is_covered_once(dims: int, origin: int) -> None:
    for shape in (s for s in SHAPES if len(s) == dims):
        box = tuple((origin + d, origin + d + n) for d, n in enumerate(shape))
        size = elements(box)
        # What is around the box has numbers that no stretch may have.
        whole = np.full([hi + 1 for _, hi in box], -1)
        whole[slices(box)] = np.arange(size).reshape(shape)
        for begin in range(size):
            for end in range(begin + 1, size + 1):
                parts = list(boxes_of(box, begin, end))
                assert len(parts) <= 2 * dims - 1
                found = [whole[slices(part)].ravel() for _, part in parts]
                assert [part[0] for part in found] == [place for place, _ in parts]
                assert np.array_equal(np.concatenate(found), np.arange(begin, end))


def test_a_stretch_of_nothing_has_no_box() -> None:
    box = ((0, 3), (2, 4))
    for begin in range(7):
        assert list(boxes_of(box, begin, begin)) == []


def test_all_that_an_interval_can_need_occurs() -> None:
    """From the middle of a row to the middle of a row, in each dim."""
    parts = [part for _, part in boxes_of(((0, 3), (0, 3), (0, 3)), 1, 26)]
    assert [lengths(part) for part in parts] == [
        (1, 1, 2), (1, 2, 3), (1, 3, 3), (1, 2, 3), (1, 1, 2)
    ]  # fmt: skip


def test_an_intersection_is_what_both_have() -> None:
    edges = [(lo, hi) for lo in range(4) for hi in range(lo + 1, 5)]
    for one, other in product(product(edges, edges), repeat=2):
        exact = np.zeros((5, 5), int)
        exact[slices(one)] += 1
        exact[slices(other)] += 1
        found = np.zeros((5, 5), bool)
        both = intersection(one, other)
        if both is not None:
            found[slices(both)] = True
            assert both == intersection(other, one)
            inner = np.zeros(lengths(one), bool)
            inner[within(both, one)] = True
            assert np.array_equal(found[slices(one)], inner)
        assert np.array_equal(found, exact == 2)


def test_boxes_that_only_touch_share_nothing() -> None:
    assert intersection(((0, 2), (0, 3)), ((2, 4), (0, 3))) is None
    assert intersection(((0, 2), (0, 3)), ((1, 4), (3, 4))) is None


def test_a_cover_of_each_element_once_is_known() -> None:
    box = ((2, 5), (0, 4))
    cells = [((r, r + 1), (c, c + 1)) for r in range(2, 5) for c in range(4)]
    rows = [((r, r + 1), (0, 4)) for r in range(2, 5)]
    pieces = [
        part for a, b in ((0, 3), (3, 9), (9, 12)) for _, part in boxes_of(box, a, b)
    ]
    measure = Measure()
    for cover in (cells, cells[::-1], rows, pieces, [box]):
        assert measure.are_equal(measure.of(cover), measure.of([box]))


def test_a_cover_with_as_many_elements_is_not_taken_for_one() -> None:
    """One element twice, another one never: the number of elements is right."""
    box = ((0, 3), (0, 4))
    cells = [((r, r + 1), (c, c + 1)) for r in range(3) for c in range(4)]
    measure = Measure()
    for twice, never in product(range(12), repeat=2):
        cover = [*cells, cells[twice]]
        cover.remove(cells[never])
        covers = measure.are_equal(measure.of(cover), measure.of([box]))
        assert covers is (twice == never)
    halves = [((0, 3), (0, 2)), ((0, 3), (0, 2))]
    assert not measure.are_equal(measure.of(halves), measure.of([box]))
