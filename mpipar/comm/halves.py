"""Sums of 16-bit floats, which MPI cannot make: bits travel, ranks add in float32."""

from __future__ import annotations

import numpy as np

from mpipar.comm import mpi
from mpipar.comm.counters import shares
from mpipar.comm.datatypes import as_bytes
from mpipar.comm.hierarchy import Steps
from mpipar.comm.posts import Poster, Posts, own_tags
from mpipar.ops.half import add_up


class HalfSums:
    """All-reduces on the ranks of one communicator.

    Each rank is sent its share of every array, adds up and sends its sum to all: as
    many bytes as in a ring, and each sum is rounded once. The second half begins when
    a rank has its first, so in any order: it has messages and tags of its own.
    """

    def __init__(self, comm: mpi.Comm) -> None:
        self._later = Poster(comm, "I")
        self._comm = comm.Dup()
        self._back = Poster(self._comm, "I")
        self._tags = own_tags()

    def all_reduce(self, flat: np.ndarray, limit: int) -> Steps:
        """In place."""
        lengths = shares(flat.size, self._comm.size)
        tag = next(self._tags)
        arrived, blocks, posts = exchange(
            self._later, flat, lengths, self._comm.rank, limit
        )
        yield list(posts)
        own = np.empty(arrived.shape[1], flat.dtype)
        add_up(arrived, own)
        yield list(self._back.spread(as_bytes(own), as_bytes(flat), blocks, limit, tag))

    def free(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()


def exchange(
    poster: Poster, flat: np.ndarray, lengths: list[int], rank: int, limit: int
) -> tuple[np.ndarray, list[int], Posts]:
    """Send each rank its stretch of ``flat``.

    Return where those for this rank arrive, (ranks, items), the bytes of each stretch,
    and the MPI calls.
    """
    arrived = np.empty((len(lengths), lengths[rank]), flat.dtype)
    blocks = [length * flat.itemsize for length in lengths]
    incoming = as_bytes(arrived.reshape(-1))
    return arrived, blocks, poster.exchange(as_bytes(flat), incoming, blocks, limit)
