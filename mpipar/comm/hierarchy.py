"""Sums over nodes: inside of each node first, then between nodes.

    reduce_scatter   inside a node, each rank adds up what goes to the ranks of its own
                     place on all nodes; these then exchange the sums
    all_gather       ranks of the same place exchange their blocks; then those of a node
                     spread what came
    all_reduce       both in turn, for sums that MPI cannot make; its own ways with the
                     others know of nodes, and send as little

Of an array of S bytes on N nodes each node sends (N-1)/N S to the others, twice in an
all-reduce; in an exchange among all ranks it is as many times more as a node has ranks.
Sums of 16-bit floats stay float32 until the last one, and are rounded once.

Source   Karonis et al. 2000 (collectives that know of levels of a network); Jia et al.
         2018, section 3.2 (hierarchical all-reduce)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpipar.comm import mpi
from mpipar.comm.counters import shares
from mpipar.comm.datatypes import as_bytes
from mpipar.comm.posts import own_tags, pieces, split
from mpipar.ops.half import add_up, is_half

# Each yields the requests that must be complete before it goes on.
Steps = Iterator["list[mpi.Request]"]
# Below, messages in four steps take longer than one call of MPI
HIERARCHY_BYTES = 1 << 16


def ranks_per_node(nodes: Sequence[int]) -> int:
    """Return how many ranks each node has, by the node of each rank; 0 unless there are
    several nodes, each with equally many ranks, that follow each other."""
    count = len(set(nodes))
    each, rest = divmod(len(nodes), count)
    groups = [nodes[at : at + each] for at in range(0, len(nodes), each)]
    even = not rest and all(len(set(group)) == 1 for group in groups)
    return each if count > 1 and each > 1 and even else 0


class Hierarchy:
    """Operations on the ranks of ``comm``, of which ``each`` in a row are on one node.

    All are made of messages, with tags of their own: the steps of two operations may
    come in any order. Sums are made in rank order, inside a node and then over nodes.

    limit    bytes that one message may have
    """

    def __init__(self, comm: mpi.Comm, each: int, limit: int) -> None:
        self._comm, self._limit = comm.Dup(), limit
        self._rank, size = comm.rank, comm.size
        node, place = divmod(comm.rank, each)
        self._near = range(node * each, (node + 1) * each)
        self._far = range(place, size, each)
        self._tags = own_tags()

    def all_reduce(self, flat: np.ndarray) -> Steps:
        """In place."""
        tag = next(self._tags)
        blocks = list(split(flat, shares(flat.size, self._comm.size)))
        yield from self._scatter(blocks, blocks[self._rank], tag)
        yield from self._gather([as_bytes(block) for block in blocks], tag)

    def reduce_scatter(
        self, flat: np.ndarray, lengths: Sequence[int], own: np.ndarray
    ) -> Steps:
        """``lengths`` are the elements of each rank; ``own`` gets those of this one."""
        return self._scatter(list(split(flat, lengths)), own, next(self._tags))

    def all_gather(
        self, own: np.ndarray, out: np.ndarray, lengths: Sequence[int]
    ) -> Steps:
        """Bytes; ``lengths`` are those of each rank."""
        blocks = list(split(out, lengths))
        blocks[self._rank][...] = own
        return self._gather(blocks, next(self._tags))

    def free(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()

    def _scatter(self, blocks: list[np.ndarray], own: np.ndarray, tag: int) -> Steps:
        """``own`` becomes the sum of this rank's block of all ranks."""
        dtype = blocks[0].dtype
        lengths = [blocks[rank].size for rank in self._far]
        place, each = self._near.index(self._rank), len(self._near)
        near = np.empty((each, sum(lengths)), dtype)
        np.concatenate([blocks[rank] for rank in self._far], out=near[place])
        requests = []
        for row, peer in _others(self._near, place):
            requests += self._recv(list(split(near[row], lengths)), peer, tag)
            requests += self._send(blocks[row::each], peer, tag)
        yield requests

        partial = np.empty(near.shape[1], np.float32 if is_half(dtype) else dtype)
        _sum(near, partial)
        sums, node = list(split(partial, lengths)), self._far.index(self._rank)
        far = np.empty((len(self._far), own.size), partial.dtype)
        far[node] = sums[node]
        requests = []
        for row, peer in _others(self._far, node):
            requests += self._recv([far[row]], peer, tag)
            requests += self._send([sums[row]], peer, tag)
        yield requests
        _sum(far, own)

    def _gather(self, blocks: list[np.ndarray], tag: int) -> Steps:
        """All of ``blocks`` become what their ranks have in them."""
        place, each = self._near.index(self._rank), len(self._near)
        node = self._far.index(self._rank)
        requests = []
        for _, peer in _others(self._far, node):
            requests += self._recv([blocks[peer]], peer, tag)
            requests += self._send([blocks[self._rank]], peer, tag)
        yield requests
        requests = []
        for row, peer in _others(self._near, place):
            requests += self._recv(blocks[row::each], peer, tag)
            requests += self._send(blocks[place::each], peer, tag)
        yield requests

    def _recv(
        self, blocks: list[np.ndarray], source: int, tag: int
    ) -> Iterator[mpi.Request]:
        for part in self._parts(blocks):
            yield self._comm.Irecv([part, mpi.BYTE], source, tag)

    def _send(
        self, blocks: list[np.ndarray], to: int, tag: int
    ) -> Iterator[mpi.Request]:
        for part in self._parts(blocks):
            yield self._comm.Isend([part, mpi.BYTE], to, tag)

    def _parts(self, blocks: list[np.ndarray]) -> Iterator[np.ndarray]:
        for block in blocks:
            yield from pieces(as_bytes(block), self._limit)


def _others(ranks: range, own: int) -> Iterator[tuple[int, int]]:
    """Places and ranks but the own one, those behind it first: not all at one rank."""
    for hop in range(1, len(ranks)):
        place = (own + hop) % len(ranks)
        yield place, ranks[place]


def _sum(parts: np.ndarray, out: np.ndarray) -> None:
    """out = sum of the rows of ``parts``, in order."""
    if is_half(parts.dtype) or parts.dtype != out.dtype:
        add_up(parts, out)
    else:
        np.add.reduce(parts, axis=0, out=out)
