"""Collectives and messages on arrays: one axis of the grid, seen from one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpipar.comm import mpi
from mpipar.comm.calls import COLLECTIVE, CallLog, Channel
from mpipar.comm.counters import (
    Counters,
    ring_gather_bytes,
    ring_reduce_bytes,
    ring_scatter_bytes,
)
from mpipar.comm.datatypes import as_bytes, reduction
from mpipar.comm.handle import Handle
from mpipar.comm.posts import Poster, pieces
from mpipar.comm.transport import Array, Host, Transport
from mpipar.errors import ShapeError


class Communicator:
    """The ranks of one axis, with counted, watched and chunked operations on arrays.

    Arrays may have any strides; results and in-place updates equal what NumPy computes
    on the logical arrays. Blocking forms use MPI's blocking calls, which are faster;
    ``_start`` forms return a Handle, and their arrays must be left alone until its
    ``wait``. Messages larger than ``chunk_bytes`` are split. Nothing relies on MPI
    buffering a message; with ``synchronous`` set no send is buffered at all.

    comm      the MPI communicator; ``free`` frees it
    name      the axis, as counters and the watchdog call it
    members   rank in the world of each rank of ``comm``
    polite    leave the core to others while waiting (more ranks than cores)
    """

    chunk_bytes = 1 << 30
    synchronous = False

    def __init__(
        self,
        comm: mpi.Comm,
        name: str,
        counters: Counters,
        transport: Transport | None = None,
        *,
        log: CallLog | None = None,
        members: Sequence[int] | None = None,
        polite: bool = False,
    ) -> None:
        self.mpi = comm
        self.name = name
        self.size: int = comm.size
        self.rank: int = comm.rank
        self.counters = counters
        self.transport = transport or Host()
        self.members = range(self.size) if members is None else members
        self._log = log or CallLog()
        self._polite = polite
        self._collectives = self._log.channel(name, COLLECTIVE, self.members)
        self._messages: dict[tuple[int, int, int], Channel] = {}
        self._now = Poster(comm, "")
        self._later = Poster(comm, "I")

    # Collectives

    def all_reduce(self, x: Array, op: str = "sum") -> Array:
        """Replace ``x`` on every rank by the sum (or max) over ranks; return it."""
        return self._all_reduce(x, op, self._now).wait()

    def all_reduce_start(self, x: Array, op: str = "sum") -> Handle:
        """Start ``all_reduce``."""
        return self._all_reduce(x, op, self._later)

    def all_gather(self, x: Array, counts: Sequence[int] | None = None) -> Array:
        """Return a new array with the ranks' ``x`` joined along dim 0.

        All have equally many rows unless ``counts`` gives the rows of each rank. A 0-d
        array counts as one row. Raises ShapeError if ``counts`` denies the own rows.
        """
        return self._all_gather(x, counts, self._now).wait()

    def all_gather_start(self, x: Array, counts: Sequence[int] | None = None) -> Handle:
        """Start ``all_gather``."""
        return self._all_gather(x, counts, self._later)

    def reduce_scatter(self, x: Array, counts: Sequence[int] | None = None) -> Array:
        """Return the own rows of the sum of the ranks' ``x``, cut along dim 0.

        Every rank gets equally many rows unless ``counts`` gives the rows of each.
        Raises ShapeError if the rows cannot be cut that way.
        """
        return self._reduce_scatter(x, counts, self._now).wait()

    def reduce_scatter_start(
        self, x: Array, counts: Sequence[int] | None = None
    ) -> Handle:
        """Start ``reduce_scatter``."""
        return self._reduce_scatter(x, counts, self._later)

    def all_to_all(self, x: Array) -> Array:
        """Cut ``x`` in equal parts along dim 0, send part i to rank i.

        Return a new array of the same shape with the parts that came, by rank.
        Raises ShapeError if the rows cannot be cut equally.
        """
        self._even_rows("all_to_all", x)
        flat, handle = self._begin("all_to_all", x, x.nbytes - x.nbytes // self.size)
        out = np.empty(x.shape, x.dtype)
        bytes_in, bytes_out = as_bytes(flat), as_bytes(out.reshape(-1))
        posts = self._now.all_to_all(bytes_in, bytes_out, self.chunk_bytes)
        return handle.launch(posts, lambda: self.transport.give(out, x)).wait()

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Replace ``x`` on every rank by the root's values; return it."""
        sent = x.nbytes if self.rank == root else 0
        flat, handle = self._begin("broadcast", x, sent)
        posts = self._now.broadcast(as_bytes(flat), root, self.chunk_bytes)
        return handle.launch(posts, lambda: self._put_back(flat, x)).wait()

    def barrier(self) -> None:
        """Return when every rank is here."""
        with self._inside("barrier") as tally:
            tally.calls += 1
            self.mpi.Barrier()

    # Messages

    def send(self, x: Array, to: int, tag: int = 0) -> None:
        """Send ``x`` to rank ``to``; returns when ``x`` may be changed again."""
        self._send(x, to, tag, "send").wait()

    def send_start(self, x: Array, to: int, tag: int = 0) -> Handle:
        """Start ``send``."""
        return self._send(x, to, tag, "send")

    def recv(self, x: Array, source: int, tag: int = 0) -> Array:
        """Fill ``x`` with the message of rank ``source``; return it.

        Raises CommError if the message has another size.
        """
        return self._recv(x, source, tag, "recv").wait()

    def recv_start(self, x: Array, source: int, tag: int = 0) -> Handle:
        """Start ``recv``."""
        return self._recv(x, source, tag, "recv")

    def send_recv(
        self, x: Array, to: int, out: Array, source: int, tag: int = 0
    ) -> Array:
        """Send ``x`` to ``to``, fill ``out`` from ``source``; return ``out``."""
        arriving = self._recv(out, source, tag, "send_recv", calls=0)
        leaving = self._send(x, to, tag, "send_recv")
        arriving.wait()
        leaving.wait()
        return out

    # Pickled objects, for set-up only

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the ranks' objects on the root, None elsewhere."""
        with self._inside("gather_obj"):
            return self.mpi.gather(obj, root)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return the ranks' objects on every rank."""
        with self._inside("all_gather_obj"):
            return self.mpi.allgather(obj)

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object on every rank."""
        with self._inside("broadcast_obj"):
            return self.mpi.bcast(obj, root)

    def free(self) -> None:
        """Free the MPI communicator; collective over its ranks."""
        self.mpi.Free()

    # How it is done

    def _begin(
        self,
        op: str,
        x: Array,
        sent: int,
        channel: Channel | None = None,
        calls: int = 1,
    ) -> tuple[np.ndarray, Handle]:
        """Bring ``x`` where MPI can read it, count the call and tell the watchdog."""
        entered = time.perf_counter()
        flat = self.transport.pull(x).reshape(-1)
        now = time.perf_counter()
        tally = self.counters.tally(self.name, op)
        tally.calls += calls
        tally.bytes += sent
        tally.seconds += now - entered
        call = (channel or self._collectives).enter(op, flat.nbytes, now)
        self._log.current = call
        return flat, Handle(call, self._log, tally, self._polite)

    def _put_back(self, flat: np.ndarray, x: Array) -> Array:
        self.transport.push(flat, x)
        return x

    def _all_reduce(self, x: Array, op: str, poster: Poster) -> Handle:
        kind, mpi_op = reduction(x.dtype, op)
        sent = ring_reduce_bytes(x.size, x.itemsize, self.size, self.rank)
        flat, handle = self._begin("all_reduce", x, sent)
        posts = poster.all_reduce(flat, kind, mpi_op, self.chunk_bytes)
        return handle.launch(posts, lambda: self._put_back(flat, x))

    def _all_gather(
        self, x: Array, counts: Sequence[int] | None, poster: Poster
    ) -> Handle:
        rows, tail = (x.shape[0], x.shape[1:]) if x.ndim else (1, ())
        if counts is None:
            blocks, length, sent = None, rows * self.size, x.nbytes * (self.size - 1)
        else:
            self._check_counts("all_gather", counts, counts[self.rank], rows)
            width = x.itemsize * math.prod(tail)
            blocks, length = [count * width for count in counts], sum(counts)
            sent = ring_gather_bytes(blocks, self.rank)
        flat, handle = self._begin("all_gather", x, sent)
        out = np.empty((length, *tail), x.dtype)
        own, whole = as_bytes(flat), as_bytes(out.reshape(-1))
        posts = poster.all_gather(own, whole, blocks, self.chunk_bytes)
        return handle.launch(posts, lambda: self.transport.give(out, x))

    def _reduce_scatter(
        self, x: Array, counts: Sequence[int] | None, poster: Poster
    ) -> Handle:
        kind, op = reduction(x.dtype, "sum")
        if counts is None:
            counts = [self._even_rows("reduce_scatter", x)] * self.size
        self._check_counts("reduce_scatter", counts, sum(counts), len(x))
        blocks = [count * math.prod(x.shape[1:]) for count in counts]
        sent = x.itemsize * ring_scatter_bytes(blocks, self.rank)
        flat, handle = self._begin("reduce_scatter", x, sent)
        out = np.empty((counts[self.rank], *x.shape[1:]), x.dtype)
        posts = poster.reduce_scatter(
            flat, out.reshape(-1), blocks, kind, op, self.chunk_bytes
        )
        return handle.launch(posts, lambda: self.transport.give(out, x))

    def _send(self, x: Array, to: int, tag: int, op: str) -> Handle:
        post = self.mpi.Issend if self.synchronous else self.mpi.Isend
        channel = self._message_channel(self.rank, to, tag)
        flat, handle = self._begin(op, x, x.nbytes, channel)
        parts = pieces(as_bytes(flat), self.chunk_bytes)
        return handle.launch((post([p, mpi.BYTE], to, tag) for p in parts), lambda: x)

    def _recv(self, x: Array, source: int, tag: int, op: str, calls: int = 1) -> Handle:
        channel = self._message_channel(source, self.rank, tag)
        flat, handle = self._begin(op, x, 0, channel, calls)
        parts = pieces(as_bytes(flat), self.chunk_bytes)
        posts = (self.mpi.Irecv([part, mpi.BYTE], source, tag) for part in parts)
        return handle.launch(
            posts, lambda: self._put_back(flat, x), [part.size for part in parts]
        )

    def _message_channel(self, source: int, to: int, tag: int) -> Channel:
        """The channel of these messages, under the same name on both ends."""
        key = source, to, tag
        if key not in self._messages:
            ends = [self.members[source], self.members[to]]
            name = f"rank {source} to {to}, tag {tag}"
            self._messages[key] = self._log.channel(self.name, name, ends)
        return self._messages[key]

    @contextmanager
    def _inside(self, op: str) -> Iterator[Any]:
        """Time and watch a collective that has no array."""
        tally = self.counters.tally(self.name, op)
        began = time.perf_counter()
        self._log.current = self._collectives.enter(op, 0, began)
        try:
            yield tally
        finally:
            self._log.current = None
            spent = time.perf_counter() - began
            tally.seconds += spent
            tally.wait += spent

    def _even_rows(self, op: str, x: Array) -> int:
        rows = x.shape[0] if x.ndim else 1
        if rows % self.size:
            raise ShapeError(
                f"{op} on axis {self.name}: {rows} rows of shape {x.shape} cannot be "
                f"cut in {self.size} equal parts"
            )
        return rows // self.size

    def _check_counts(
        self, op: str, counts: Sequence[int], told: int, rows: int
    ) -> None:
        if len(counts) != self.size or told != rows:
            raise ShapeError(
                f"{op} on axis {self.name}: counts {list(counts)} do not describe "
                f"{rows} rows on rank {self.rank} of {self.size}"
            )
