"""Which positions of a sequence a rank holds."""

import numpy as np

from mpipar.errors import ShapeError


def held_positions(length: int, ranks: int, rank: int, layout: str) -> np.ndarray:
    """Global positions that this rank of the context axis holds, ascending.

    Tokens, labels and angles are taken at these positions from the whole sequence, so
    nothing is lost or mispaired where it is cut.

    layout   contiguous  [r·s/n, (r+1)·s/n)
             zigzag      chunks r and 2n−1−r of 2n, so that causal work is equal
             striped     r, r+n, r+2n, … (Brandon et al. 2023)
    Raises   ShapeError where the parts would not be equal
    """
    parts = 2 * ranks if layout == "zigzag" else ranks
    if length % parts:
        raise ShapeError(
            f"{length} positions cannot be cut in {parts} equal parts ({layout})"
        )
    if layout == "contiguous":
        return np.arange(length).reshape(ranks, -1)[rank]
    if layout == "striped":
        return np.arange(rank, length, ranks)
    if layout == "zigzag":
        chunks = np.arange(length).reshape(parts, -1)
        return np.concatenate([chunks[rank], chunks[parts - 1 - rank]])
    raise ValueError(f"unknown context layout {layout!r}")
