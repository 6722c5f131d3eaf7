"""Checks of the shapes that collectives are given; ``where`` names call and axis."""

import math
from collections.abc import Sequence

import numpy as np

from mpipar.comm.counters import ring_gather_bytes
from mpipar.comm.transport import Array
from mpipar.errors import ShapeError

# Rows that go to each rank, and rows that come from each
Routes = tuple[Sequence[int], Sequence[int]]


def even_rows(where: str, x: Array, size: int) -> int:
    """Return the rows of one of ``size`` equal parts; ShapeError if they are not."""
    rows = x.shape[0] if x.ndim else 1
    if rows % size:
        raise ShapeError(
            f"{where}: {rows} rows of shape {x.shape} cannot be cut in {size} equal "
            "parts"
        )
    return rows // size


def check_counts(
    where: str, counts: Sequence[int], size: int, told: int, rows: int
) -> None:
    """Raise ShapeError unless ``size`` ranks have counts and ``told`` is ``rows``."""
    if len(counts) != size or told != rows:
        raise ShapeError(
            f"{where}: counts {list(counts)} do not describe {rows} rows of {size} "
            "ranks"
        )


def check_out(where: str, out: Array, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise ShapeError unless ``out`` is None or a contiguous array of that kind."""
    if out is None:
        return
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise ShapeError(
            f"{where}: out must be a contiguous {shape} of {dtype}, not {out.shape} "
            f"of {out.dtype}"
        )


def gather_sizes(
    where: str, x: Array, counts: Sequence[int] | None, size: int, rank: int
) -> tuple[list[int] | None, tuple[int, ...], int]:
    """Return the bytes of each rank's rows, None where equal; the shape of all rows;
    and the bytes that this rank sends.

    Raises ShapeError if ``counts`` denies the own rows.
    """
    rows, tail = (x.shape[0], x.shape[1:]) if x.ndim else (1, ())
    if counts is None:
        return None, (rows * size, *tail), x.nbytes * (size - 1)
    check_counts(where, counts, size, sum(counts[rank : rank + 1]), rows)
    width = x.itemsize * math.prod(tail)
    blocks = [count * width for count in counts]
    return blocks, (sum(counts), *tail), ring_gather_bytes(blocks, rank)


def scatter_sizes(
    where: str, x: Array, counts: Sequence[int] | None, size: int, rank: int
) -> tuple[list[int], tuple[int, ...]]:
    """Return the items of each rank's rows, and the shape of the own ones.

    Raises ShapeError if the rows cannot be cut that way.
    """
    if counts is None:
        counts = [even_rows(where, x, size)] * size
    check_counts(where, counts, size, sum(counts), len(x))
    blocks = [count * math.prod(x.shape[1:]) for count in counts]
    return blocks, (counts[rank], *x.shape[1:])


def route_sizes(
    where: str, x: Array, counts: Routes | None, size: int
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Return the bytes that go to each rank and that come from each, and the shape of
    what comes.

    Raises ShapeError if the rows cannot be cut that way.
    """
    if counts is None:
        counts = [[even_rows(where, x, size)] * size] * 2
    leaving, arriving = counts
    check_counts(where, leaving, size, sum(leaving), len(x))
    width = x.itemsize * math.prod(x.shape[1:])
    sides = [[rows * width for rows in side] for side in counts]
    return sides, (sum(arriving), *x.shape[1:])
