"""The MPI calls behind each operation, in pieces that every MPI can count.

Each method yields what MPI returned: requests from the nonblocking calls, None from the
blocking ones. Arrays are flat and contiguous, and the same length on all ranks unless
``blocks`` says otherwise, so all ranks cut them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, repeat

import numpy as np

from mpipar.comm import mpi

Posts = Iterator["mpi.Request | None"]
_EXCHANGE_TAG = 32767  # the largest tag that every MPI has; users stay below it


class Poster:
    """Blocking (``prefix`` "") or nonblocking (``prefix`` "I") calls on ``comm``.

    limit    bytes that one piece may have
    """

    def __init__(self, comm: mpi.Comm, prefix: str) -> None:
        def call(name: str) -> object:
            return getattr(comm, "I" + name if prefix else name.capitalize())

        self._comm = comm
        self._allreduce = call("allreduce")
        self._allgather = call("allgather")
        self._allgatherv = call("allgatherv")
        self._alltoall = call("alltoall")
        self._alltoallv = call("alltoallv")
        self._reduce_scatter = call("reduce_scatter")
        self._reduce = call("reduce")
        self._bcast = call("bcast")

    def all_reduce(
        self, flat: np.ndarray, kind: mpi.Datatype, op: mpi.Op, limit: int
    ) -> Posts:
        """In place."""
        for part in pieces(flat, limit):
            yield self._allreduce(mpi.IN_PLACE, [part, kind], op=op)

    def broadcast(self, flat: np.ndarray, root: int, limit: int) -> Posts:
        """Bytes, in place."""
        for part in pieces(flat, limit):
            yield self._bcast([part, mpi.BYTE], root)

    def all_gather(
        self, own: np.ndarray, out: np.ndarray, blocks: list[int] | None, limit: int
    ) -> Posts:
        """Bytes; ``blocks`` is None when all ranks bring the same number."""
        if out.size > limit:
            # Offsets may not fit MPI's integers here: every rank broadcasts its block
            lengths = blocks or [own.size] * self._comm.size
            for root, block in enumerate(split(out, lengths)):
                if root == self._comm.rank:
                    block[...] = own
                yield from self.broadcast(block, root, limit)
        elif blocks is None:
            yield self._allgather([own, mpi.BYTE], [out, mpi.BYTE])
        else:
            yield self._allgatherv([own, mpi.BYTE], [out, blocks, None, mpi.BYTE])

    def reduce_scatter(
        self,
        flat: np.ndarray,
        out: np.ndarray,
        blocks: list[int],
        kind: mpi.Datatype,
        op: mpi.Op,
        limit: int,
    ) -> Posts:
        """``blocks`` are the elements that each rank gets."""
        if flat.nbytes <= limit:
            # Not Reduce_scatter_block, which is slow in Open MPI
            yield self._reduce_scatter([flat, kind], [out, kind], blocks, op)
            return
        for root, block in enumerate(split(flat, blocks)):
            own = root == self._comm.rank
            targets = pieces(out, limit) if own else repeat(None)
            for part, target in zip(pieces(block, limit), targets, strict=False):
                into = [target, kind] if own else None
                yield self._reduce([part, kind], into, op, root)

    def all_to_all(
        self,
        flat: np.ndarray,
        out: np.ndarray,
        blocks: Sequence[Sequence[int]] | None,
        limit: int,
    ) -> Posts:
        """Bytes; above the limit, and with ``blocks``, nonblocking whatever the prefix.

        blocks   bytes that go to each rank and that come from each; None = equal. Each
                 rank knows only its own, so all of them send messages at any size
        """
        n = self._comm.size
        if blocks is not None:
            leaving, arriving = blocks
            sides = list(split(flat, leaving)), list(split(out, arriving))
            yield from self._hops(*sides, limit)
        elif flat.size <= limit:
            yield self._alltoall([flat, mpi.BYTE], [out, mpi.BYTE])
        else:
            yield from self._hops(flat.reshape(n, -1), out.reshape(n, -1), limit)

    def exchange(
        self, flat: np.ndarray, out: np.ndarray, blocks: list[int], limit: int
    ) -> Posts:
        """Bytes: block i of ``flat`` goes to rank i, whose ``out`` has what came by
        rank; above the limit nonblocking."""
        own = [blocks[self._comm.rank]] * self._comm.size
        # All ranks must choose alike, so by the largest block.
        if max(sum(blocks), len(blocks) * max(blocks)) <= limit:
            yield self._alltoallv(
                [flat, blocks, None, mpi.BYTE], [out, own, None, mpi.BYTE]
            )
            return
        yield from self._hops(list(split(flat, blocks)), list(split(out, own)), limit)

    def spread(
        self, own: np.ndarray, out: np.ndarray, blocks: list[int], limit: int, tag: int
    ) -> Posts:
        """Bytes: an all-gather by messages of their own tag, so in any order."""
        arriving = list(split(out, blocks))
        return self._hops([own] * len(arriving), arriving, limit, tag)

    def _hops(
        self,
        leaving: Sequence[np.ndarray],
        arriving: Sequence[np.ndarray],
        limit: int,
        tag: int = _EXCHANGE_TAG,
    ) -> Posts:
        """leaving[i] goes to rank i, what rank i sends to arriving[i]."""
        n, rank = self._comm.size, self._comm.rank
        for hop in range(n):
            to, source = (rank + hop) % n, (rank - hop) % n
            for part in pieces(arriving[source], limit):
                yield self._comm.Irecv([part, mpi.BYTE], source, tag)
            for part in pieces(leaving[to], limit):
                yield self._comm.Isend([part, mpi.BYTE], to, tag)


def own_tags() -> Iterator[int]:
    """Tags in turn, for operations on a communicator of their own."""
    return cycle(range(_EXCHANGE_TAG))


def pieces(flat: np.ndarray, limit: int) -> list[np.ndarray]:
    """Cut a 1-D array in pieces of at most ``limit`` bytes; never no piece."""
    if flat.nbytes <= limit:
        return [flat]
    step = max(1, limit // flat.itemsize)
    return [flat[at : at + step] for at in range(0, flat.size, step)]


def split(flat: np.ndarray, lengths: Iterable[int]) -> Iterator[np.ndarray]:
    """Cut a 1-D array in stretches of these lengths."""
    at = 0
    for length in lengths:
        yield flat[at : at + length]
        at += length
