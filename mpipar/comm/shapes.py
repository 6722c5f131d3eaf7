"""Checks of the shapes that collectives are given; ``where`` names call and axis."""

from collections.abc import Sequence

import numpy as np

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
