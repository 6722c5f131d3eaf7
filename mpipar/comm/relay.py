"""Collectives on arrays of a device, made of messages; sums are made on the device.

    exchange   every rank is sent its stretch of every array
    spread     every rank sends its own stretch to all

A reduce-scatter is an exchange and a sum, an all-reduce both and a spread: as many
bytes as in a ring. Sums are made in rank order, those of 16-bit floats in float32 and
rounded once: all ranks hold the same bits, as they would after sums in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from mpipar.comm import mpi
from mpipar.comm.counters import shares
from mpipar.comm.memory import DeviceMemory, Span, Window
from mpipar.comm.posts import own_tags

Array = Any
# Each yields what must be complete before it goes on: a copy, or requests
Steps = Iterator["list[mpi.Request] | Window"]


class Relay:
    """Collectives on the ranks of ``comm``; arrays are flat and contiguous.

    Messages have a communicator and tags of their own: operations may come to their
    next steps in any order.

    limit   bytes that one message may have
    """

    def __init__(self, comm: mpi.Comm, memory: DeviceMemory, limit: int) -> None:
        self._comm, self._memory, self._limit = comm.Dup(), memory, limit
        self._size, self._rank = comm.size, comm.rank
        self._tags = own_tags()

    def all_reduce(self, flat: Array, op: str) -> Steps:
        """In place."""
        tag, stretches = next(self._tags), _spans(shares(flat.size, self._size))
        lo, hi = stretches[self._rank]
        x = self._memory.window(flat)
        cuts = _scaled(stretches, flat.itemsize)
        x.fetch(*self._others(cuts))
        yield x
        yield from self._reduce(x, cuts, flat[lo:hi], op, tag)
        x.fetch(cuts[self._rank], stream=x.enter())
        yield x
        yield from self._trade(x, [cuts[self._rank]] * self._size, x, cuts, tag)
        x.close()

    def reduce_scatter(self, flat: Array, lengths: Sequence[int], out: Array) -> Steps:
        """``lengths`` are the items of each rank; ``out`` gets the sum of the own."""
        tag, x = next(self._tags), self._memory.window(flat)
        cuts = _scaled(_spans(lengths), flat.itemsize)
        x.fetch(*self._others(cuts))
        yield x
        yield from self._reduce(x, cuts, out, "sum", tag)
        x.close()

    def all_gather(self, own: Array, out: Array, lengths: Sequence[int]) -> Steps:
        """``lengths`` are the bytes of each rank."""
        tag, cuts = next(self._tags), _spans(lengths)
        lo, hi = cuts[self._rank]
        x, y = self._memory.window(own), self._memory.window(out)
        x.fetch()
        if y.bytes[lo:hi].data.ptr != x.bytes.data.ptr:
            y.bytes[lo:hi] = x.bytes
        yield x
        y.clear()
        yield from self._trade(x, [(0, own.nbytes)] * self._size, y, cuts, tag)
        x.close()
        y.close()

    def all_to_all(
        self,
        flat: Array,
        out: Array,
        leaving: Sequence[int],
        arriving: Sequence[int],
    ) -> Steps:
        """Bytes that go to each rank and that come from each."""
        tag, sent, came = next(self._tags), _spans(leaving), _spans(arriving)
        x, y = self._memory.window(flat), self._memory.window(out)
        x.fetch(*self._others(sent))
        (a, b), (lo, hi) = sent[self._rank], came[self._rank]
        y.bytes[lo:hi] = x.bytes[a:b]
        yield x
        y.clear()
        yield from self._trade(x, sent, y, came, tag)
        x.close()
        y.close()

    def broadcast(self, flat: Array, root: int) -> Steps:
        """In place: the root scatters, then all spread what they have."""
        tag, x = next(self._tags), self._memory.window(flat)
        cuts = _spans(shares(flat.nbytes, self._size))
        if self._rank == root:
            x.fetch()
        yield x
        x.clear()
        if self._rank == root:
            yield [
                request
                for rank in range(self._size)
                if rank != root
                for request in self._send(x, cuts[rank], rank, tag)
            ]
        else:
            yield list(self._recv(x, cuts[self._rank], root, tag))
            x.store(cuts[self._rank])
        yield from self._trade(x, [cuts[self._rank]] * self._size, x, cuts, tag)
        x.close()

    def free(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()

    def _reduce(
        self, x: Window, cuts: list[Span], out: Array, op: str, tag: int
    ) -> Steps:
        """out = the sum of all ranks' own stretch; it may be that stretch of ``x``."""
        lo, hi = cuts[self._rank]
        dtype, on = x.flat.dtype, x.enter()
        items = slice(lo // dtype.itemsize, hi // dtype.itemsize)
        rows = self._memory.scratch((self._size, items.stop - items.start), dtype)
        arrived = self._memory.window(rows.reshape(-1), on)
        arrived.clear()
        places = [(r * (hi - lo), (r + 1) * (hi - lo)) for r in range(self._size)]
        yield from self._trade(x, cuts, arrived, places, tag)
        with on:
            rows[self._rank] = x.flat[items]
            self._join(rows, out, op)
        arrived.close()

    def _join(self, rows: Array, out: Array, op: str) -> None:
        """out = the sum, or the maximum, of the rows in order."""
        ops = self._memory.ops
        if op == "sum" and rows.dtype in (ops.dtype, ops.operand_dtype):
            ops.sum_rows(rows, out)
            return
        join = ops.xp.add if op == "sum" else ops.xp.maximum
        out[...] = rows[0]
        for row in rows[1:]:
            join(out, row, out=out)

    def _trade(
        self,
        x: Window,
        leaving: Sequence[Span],
        y: Window,
        arriving: Sequence[Span],
        tag: int,
    ) -> Steps:
        """leaving[i] of ``x`` goes to rank i, what rank i sends to arriving[i] of
        ``y``; each part gets to the device while the others travel."""
        hops = []
        for hop in range(1, self._size):
            to, source = (
                (self._rank + hop) % self._size,
                (self._rank - hop) % self._size,
            )
            requests = [
                *self._recv(y, arriving[source], source, tag),
                *self._send(x, leaving[to], to, tag),
            ]
            hops.append((source, requests))
        for source, requests in hops:
            yield requests
            y.store(arriving[source])

    def _others(self, cuts: Sequence[Span]) -> list[Span]:
        """The parts of other ranks, the next one's first."""
        n = len(cuts)
        return [cuts[(self._rank + hop) % n] for hop in range(1, n)]

    def _recv(
        self, y: Window, span: Span, source: int, tag: int
    ) -> Iterator[mpi.Request]:
        for lo, hi in parts(*span, self._limit):
            yield self._comm.Irecv([y.seen[lo:hi], mpi.BYTE], source, tag)

    def _send(self, x: Window, span: Span, to: int, tag: int) -> Iterator[mpi.Request]:
        for lo, hi in parts(*span, self._limit):
            yield self._comm.Isend([x.seen[lo:hi], mpi.BYTE], to, tag)


def parts(lo: int, hi: int, limit: int) -> list[Span]:
    """Cut a span in parts of at most ``limit`` bytes; never no part."""
    edges = [*range(lo, hi, limit), hi] if hi > lo else [lo, hi]
    return list(zip(edges[:-1], edges[1:], strict=True))


def _spans(lengths: Sequence[int]) -> list[Span]:
    edges = list(accumulate(lengths, initial=0))
    return list(zip(edges[:-1], edges[1:], strict=True))


def _scaled(spans: Sequence[Span], width: int) -> list[Span]:
    return [(lo * width, hi * width) for lo, hi in spans]
