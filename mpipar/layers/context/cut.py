"""Which positions of a sequence each rank of the context axis holds."""

from dataclasses import dataclass

import numpy as np

from mpipar.errors import ShapeError

# How the sequence lies on the ranks that exchange keys and values, by method
LAYOUTS = {
    "ring": "contiguous",
    "zigzag": "zigzag",
    "striped": "striped",
    "allgather": "zigzag",
    "ulysses": "contiguous",
    "usp": "zigzag",
}


@dataclass(frozen=True)
class Cut:
    """A sequence cut over `ranks` ranks by a method.

    heads   neighbours of them that exchange heads instead (Ulysses): all of them in
            "ulysses", some in "usp", else 1
    """

    method: str = "ring"
    ranks: int = 1
    heads: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of the sequence, each held by `heads` neighbours."""
        return self.ranks // self.heads

    @property
    def multiple(self) -> int:
        """What the length must be a multiple of."""
        chunks = 2 if LAYOUTS[self.method] == "zigzag" and self.blocks > 1 else 1
        return chunks * self.ranks

    def of_block(self, length: int, block: int) -> np.ndarray:
        """Positions of a block, ascending."""
        return held_positions(length, self.blocks, block, LAYOUTS[self.method])

    def of_rank(self, length: int, rank: int) -> np.ndarray:
        """Positions that a rank holds outside of attention, ascending.

        Raises ShapeError where the parts would not be equal.
        """
        if length % self.ranks:
            raise ShapeError(
                f"{length} positions cannot be cut in {self.ranks} equal parts "
                f"({self.method})"
            )
        block, part = divmod(rank, self.heads)
        return self.of_block(length, block).reshape(self.heads, -1)[part]


def held_positions(length: int, ranks: int, rank: int, layout: str) -> np.ndarray:
    """Global positions that one of `ranks` holds, ascending.

    Tokens, labels and angles are taken at these positions from the whole sequence, so
    nothing is lost or mispaired where it is cut.

    layout   contiguous  [r·s/n, (r+1)·s/n)
             zigzag      chunks r and 2n−1−r of 2n, so that causal work is equal
             striped     r, r+n, r+2n, … (Brandon et al. 2023)
    Raises   ShapeError where the parts would not be equal
    """
    parts = 2 * ranks if layout == "zigzag" and ranks > 1 else ranks
    if length % parts:
        raise ShapeError(
            f"{length} positions cannot be cut in {parts} equal parts ({layout})"
        )
    if layout == "contiguous" or ranks == 1:
        return np.arange(length).reshape(ranks, -1)[rank]
    if layout == "striped":
        return np.arange(rank, length, ranks)
    if layout == "zigzag":
        chunks = np.arange(length).reshape(parts, -1)
        return np.concatenate([chunks[rank], chunks[parts - 1 - rank]])
    raise ValueError(f"unknown context layout {layout!r}")
