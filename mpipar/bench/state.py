"""A training state of any size, shared among ranks as ZeRO does."""

from collections.abc import Iterator

import numpy as np

from mpipar.checkpoint import Fragment, fragments_of
from mpipar.checkpoint.manifest import checksum
from mpipar.layers.parameter import Parameter, whole
from mpipar.zero.flat import Piece, Unit

KINDS = ("weights", "m", "v")
_BLOCKS = 12
# Bytes of a weight and its moments, in fp32
_BYTES = 4 * len(KINDS)


class SharedState:
    """Weights and moments of a GPT of 12 blocks, of which each rank has its part.

    size     in bytes, of all ranks;  nbytes  what it came to, a little less
    arrays   by kind: this rank's stretches of all units, one after another
    """

    def __init__(self, size: int, rank: int, ranks: int) -> None:
        units, begin = [], 0
        for parameters in _parameters(size // _BYTES):
            units.append(Unit(parameters, begin, ranks))
            begin += units[-1].size
        self.nbytes = sum(unit.filled for unit in units) * _BYTES
        draw, own_size = np.random.default_rng(rank), begin // ranks
        self.arrays = {kind: draw.random(own_size, np.float32) for kind in KINDS}
        self._stretches = [unit.stretch_of_parts(ranks) for unit in units]
        self._pieces = []
        for unit, own in zip(units, self._stretches, strict=True):
            lo, hi = (unit.size // ranks * i for i in (rank, rank + 1))
            piece = Piece(unit, lo, hi, self.arrays["weights"][own], None)
            self._pieces.append(piece)

    def fragments(self) -> list[Fragment]:
        """What this rank saves and loads."""
        held = {
            kind: [x[own] for own in self._stretches] for kind, x in self.arrays.items()
        }
        return list(fragments_of(self._pieces, held))

    def update(self) -> None:
        """Changes every number a little."""
        for x in self.arrays.values():
            np.multiply(x, np.float32(0.999), out=x)

    def clear(self) -> None:
        """Forgets every number."""
        for x in self.arrays.values():
            x[...] = np.nan

    def sums(self) -> list[str]:
        """A checksum of every fragment's array."""
        return [checksum(x) for f in self.fragments() for x in f.arrays.values()]


def _parameters(count: int) -> Iterator[list[Parameter]]:
    """`count` weights, or fewer by less than a row: an embedding, then blocks."""
    # Blocks of 12 d² + 2 d; at least d rows are left for the embedding
    width = max(1, int((count / (12 * _BLOCKS + 1)) ** 0.5) - 1)
    blocks = [_block(f"blocks.{number}", width) for number in range(_BLOCKS)]
    rest = count - sum(p.size for block in blocks for p in block)
    yield [_weight("embedding.weight", rest // width, width)]
    yield from blocks


def _block(name: str, width: int) -> list[Parameter]:
    attention = [
        _weight(f"{name}.attention.{part}.weight", width, width)
        for part in ("q", "k", "v", "out")
    ]
    mlp = [
        _weight(f"{name}.mlp.up.weight", 4 * width, width),
        _weight(f"{name}.mlp.down.weight", width, 4 * width),
    ]
    norms = [_weight(f"{name}.norm{number}.gain", width) for number in (1, 2)]
    return [norms[0], *attention, norms[1], *mlp]


def _weight(name: str, *shape: int) -> Parameter:
    return whole(name, shape, "ones", partial="", owner=True)
