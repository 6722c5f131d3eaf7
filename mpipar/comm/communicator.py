"""Collectives and messages on arrays: one axis of the grid, seen from one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm import mpi, shared
from mpipar.comm.bell import MESSAGES, ROUNDS, Bell
from mpipar.comm.calls import COLLECTIVE, CallLog, Channel
from mpipar.comm.counters import (
    Counters,
    ring_reduce_bytes,
    ring_scatter_bytes,
    shares,
)
from mpipar.comm.datatypes import as_bytes, reduction
from mpipar.comm.halves import HalfSums, exchange
from mpipar.comm.handle import Handle
from mpipar.comm.hierarchy import HIERARCHY_BYTES, Hierarchy, Steps, ranks_per_node
from mpipar.comm.messages import Messages
from mpipar.comm.objects import Objects
from mpipar.comm.posts import Poster
from mpipar.comm.shapes import (
    Routes,
    check_out,
    gather_sizes,
    route_sizes,
    scatter_sizes,
)
from mpipar.comm.shared import Desk, Work, bounds_of, segment_of, share
from mpipar.comm.transport import Array, solid
from mpipar.ops.half import add_up, is_half

if TYPE_CHECKING:
    from mpipar.comm.memory import Lane


class Communicator(Messages, Objects):
    """The ranks of one axis, with counted, watched and chunked operations on arrays.

    Arrays may have any strides; results and in-place updates equal what NumPy computes
    on the logical arrays. Blocking forms use MPI's blocking calls, which are faster
    unless ranks outnumber cores; ``_start`` forms return a Handle, and their arrays
    must be left alone until its ``wait``. Messages larger than ``chunk_bytes`` are
    split. Nothing relies on MPI buffering a message; with ``synchronous`` set no send
    is buffered at all. 16-bit floats are added as `mpipar.ops.half` says.

    Arrays that all ranks took from ``shared_zeros``, or the same contiguous stretch of
    them, are reduced and gathered through shared memory. Where the ranks are on several
    nodes, equally many on each, large arrays are scattered and gathered inside of nodes
    and between them in turn (`mpipar.comm.hierarchy`). Such work is done by ``test`` or
    ``wait``, as is that of all-reduces of 16-bit floats: all ranks must wait for them
    in the same order.

    comm      the MPI communicator; ``free`` frees it
    name      the axis, as counters and the watchdog call it
    members   rank in the world of each rank of ``comm``
    bell      how to wait where ranks outnumber cores; None to wait inside MPI
    nodes     node of each rank of ``comm``; None to make no difference between them
    """

    hierarchy_bytes = HIERARCHY_BYTES

    def __init__(
        self,
        comm: mpi.Comm,
        name: str,
        counters: Counters,
        *,
        log: CallLog | None = None,
        members: Sequence[int] | None = None,
        bell: Bell | None = None,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.mpi = comm
        self.name = name
        self.size: int = comm.size
        self.rank: int = comm.rank
        self.counters = counters
        self.members = range(self.size) if members is None else members
        self._log = log or CallLog()
        self._bell = bell
        self._collectives = self._log.channel(name, COLLECTIVE, self.members)
        self._messages: dict[tuple[int, int, int], Channel] = {}
        # MPI blocks nowhere where ranks outnumber cores, as it spins then
        self._now = Poster(comm, "I" if bell else "")
        self._later = Poster(comm, "I")
        self._lane: Lane | None = None
        self._desk: Desk | None = None
        self._halves: HalfSums | None = None
        self._near = ranks_per_node(nodes) if nodes else 0
        self._hierarchy: Hierarchy | None = None

    # Collectives

    def all_reduce(self, x: Array, op: str = "sum") -> Array:
        """Replace ``x`` on every rank by the sum (or max) over ranks; return it."""
        return self._all_reduce(x, op, self._now).wait()

    def all_reduce_start(self, x: Array, op: str = "sum") -> Handle:
        """Start ``all_reduce``."""
        return self._all_reduce(x, op, self._later)

    def all_gather(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Array:
        """Return the ranks' ``x`` joined along dim 0, in ``out`` or a new array.

        All have equally many rows unless ``counts`` gives the rows of each rank. A 0-d
        array counts as one row. ``x`` may be the own rows of ``out``. Raises ShapeError
        if ``counts`` denies the own rows or ``out`` has another shape.
        """
        return self._all_gather(x, counts, out, self._now).wait()

    def all_gather_start(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Handle:
        """Start ``all_gather``."""
        return self._all_gather(x, counts, out, self._later)

    def reduce_scatter(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Array:
        """Return the own rows of the sum of the ranks' ``x``, cut along dim 0.

        Every rank gets equally many rows unless ``counts`` gives the rows of each. They
        are in ``out``, which may be those rows of ``x``, or in a new array; sums of
        16-bit floats may go to a float32 ``out``. Raises ShapeError if the rows cannot
        be cut that way or ``out`` has another shape.
        """
        return self._reduce_scatter(x, counts, out, self._now).wait()

    def reduce_scatter_start(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Handle:
        """Start ``reduce_scatter``."""
        return self._reduce_scatter(x, counts, out, self._later)

    def all_to_all(self, x: Array, counts: Routes | None = None) -> Array:
        """Cut ``x`` in parts along dim 0, send part i to rank i.

        Return a new array of the parts that came, by rank. Parts are equal unless
        ``counts`` gives the rows that go to each rank and those that come from each.
        Raises ShapeError if the rows cannot be cut that way.
        """
        return self._all_to_all(x, counts, self._now).wait()

    def all_to_all_start(self, x: Array, counts: Routes | None = None) -> Handle:
        """Start ``all_to_all``."""
        return self._all_to_all(x, counts, self._later)

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
            if self._bell is None:
                self.mpi.Barrier()

    # Memory

    def shared_zeros(self, size: int, dtype: DTypeLike) -> np.ndarray:
        """Return (size,) zeros that all ranks of the axis can reach.

        All ranks call it, for equally much (else ShapeError). Operations on the result
        and on contiguous stretches of it go through shared memory. Where that cannot
        be had, as on more than one node, it is private memory on all ranks.
        """
        dtype = np.dtype(dtype)
        with self._inside("shared_zeros"):
            segment = share(self.mpi, size, dtype)
            if segment is None:
                return np.zeros(size, dtype)
            if self._desk is None:
                channel = self._log.channel(self.name, "completion", self.members)
                self._desk = Desk(self.mpi, channel)
        return np.asarray(segment)

    def free(self) -> None:
        """Free the MPI communicator; collective over its ranks."""
        for part in (self._desk, self._halves, self._hierarchy):
            if part is not None:
                part.free()
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
        """Make ``x`` flat and contiguous, and open the call."""
        entered = time.perf_counter()
        flat = solid(x).reshape(-1)
        return flat, self._enter(op, flat, sent, entered, channel, calls)

    def _enter(
        self,
        op: str,
        flat: Array,
        sent: int,
        entered: float,
        channel: Channel | None = None,
        calls: int = 1,
    ) -> Handle:
        """Count a call since ``entered``, which sends ``sent`` bytes, and tell the
        watchdog; the handle holds ``flat``."""
        now = time.perf_counter()
        tally = self.counters.tally(self.name, op)
        tally.calls += calls
        tally.bytes += sent
        tally.seconds += now - entered
        call = (channel or self._collectives).enter(op, flat.nbytes, now)
        self._log.current = call
        pause = ROUNDS if channel is None else MESSAGES
        return Handle(call, self._log, tally, self._bell, pause, flat, self._lane)

    def _put_back(self, flat: np.ndarray, x: Array) -> Array:
        if not x.flags.c_contiguous:
            x[...] = flat.reshape(x.shape)
        return x

    def _all_reduce(self, x: Array, op: str, poster: Poster) -> Handle:
        half = op == "sum" and is_half(x.dtype)
        kind, mpi_op = (None, None) if half else reduction(x.dtype, op)
        sent = ring_reduce_bytes(x.size, x.itemsize, self.size, self.rank)
        flat, handle = self._begin("all_reduce", x, sent)
        segment = segment_of(x, self.mpi)
        if segment is not None:
            parts, bounds = segment.parts_at(x), bounds_of(shares(x.size, self.size))
            work = partial(shared.all_reduce, parts, self.rank, bounds, op)
            return self._together(handle, work, x)
        if half:
            if levels := self._levels(x.nbytes, half):
                steps = levels.all_reduce(flat)
            else:
                self._halves = self._halves or HalfSums(self.mpi)
                steps = self._halves.all_reduce(flat, self.chunk_bytes)
            return self._in_steps(handle, steps, lambda: self._put_back(flat, x))
        posts = poster.all_reduce(flat, kind, mpi_op, self.chunk_bytes)
        return handle.launch(posts, lambda: self._put_back(flat, x))

    def _all_gather(
        self, x: Array, counts: Sequence[int] | None, out: Array, poster: Poster
    ) -> Handle:
        where = f"all_gather on axis {self.name}"
        blocks, shape, sent = gather_sizes(where, x, counts, self.size, self.rank)
        check_out(where, out, shape, x.dtype)
        flat, handle = self._begin("all_gather", x, sent)
        nbytes = x.itemsize * math.prod(shape)
        levels, segment = self._levels(nbytes), segment_of(out, self.mpi)
        if segment is not None and not levels:
            parts = [part.view(np.uint8) for part in segment.parts_at(out)]
            bounds = bounds_of(blocks or [x.nbytes] * self.size)
            own = parts[self.rank][bounds[self.rank] : bounds[self.rank + 1]]
            own[...] = as_bytes(flat)
            work = partial(shared.all_gather, parts, self.rank, bounds)
            return self._together(handle, work, out)
        whole = np.empty(shape, x.dtype)
        own, into = as_bytes(flat), as_bytes(whole.reshape(-1))
        if levels:
            steps = levels.all_gather(own, into, blocks or [own.size] * self.size)
            return self._in_steps(handle, steps, lambda: _deliver(whole, out))
        posts = poster.all_gather(own, into, blocks, self.chunk_bytes)
        return handle.launch(posts, lambda: _deliver(whole, out))

    def _reduce_scatter(
        self, x: Array, counts: Sequence[int] | None, out: Array, poster: Poster
    ) -> Handle:
        half = is_half(x.dtype)
        kind, op = (None, None) if half else reduction(x.dtype, "sum")
        where = f"reduce_scatter on axis {self.name}"
        blocks, shape = scatter_sizes(where, x, counts, self.size, self.rank)
        wide = half and out is not None and out.dtype == np.float32
        result_type = out.dtype if wide else x.dtype
        check_out(where, out, shape, result_type)
        sent = x.itemsize * ring_scatter_bytes(blocks, self.rank)
        flat, handle = self._begin("reduce_scatter", x, sent)
        levels, segment = self._levels(x.nbytes, half), segment_of(x, self.mpi)
        if segment is not None and not levels:
            parts, bounds = segment.parts_at(x), bounds_of(blocks)
            own = np.empty(shape, result_type) if out is None else out
            flat_own = own.reshape(-1)
            work = partial(shared.reduce_scatter, parts, self.rank, bounds, flat_own)
            return self._together(handle, work, own)
        own = np.empty(shape, result_type)
        if levels:
            steps = levels.reduce_scatter(flat, blocks, own.reshape(-1))
            return self._in_steps(handle, steps, lambda: _deliver(own, out))
        if not half:
            posts = poster.reduce_scatter(
                flat, own.reshape(-1), blocks, kind, op, self.chunk_bytes
            )
            return handle.launch(posts, lambda: _deliver(own, out))
        arrived, _, posts = exchange(poster, flat, blocks, self.rank, self.chunk_bytes)

        def finish() -> Array:
            add_up(arrived, own.reshape(-1))
            return _deliver(own, out)

        return handle.launch(posts, finish)

    def _all_to_all(self, x: Array, counts: Routes | None, poster: Poster) -> Handle:
        where = f"all_to_all on axis {self.name}"
        blocks, shape = route_sizes(where, x, counts, self.size)
        own = blocks[0][self.rank]
        flat, handle = self._begin("all_to_all", x, x.nbytes - own)
        out = np.empty(shape, x.dtype)
        blocks = None if counts is None else blocks
        bytes_in, bytes_out = as_bytes(flat), as_bytes(out.reshape(-1))
        posts = poster.all_to_all(bytes_in, bytes_out, blocks, self.chunk_bytes)
        return handle.launch(posts, lambda: out)

    def _levels(self, nbytes: int, half_sums: bool = False) -> Hierarchy | None:
        """The way over nodes, if it is the one for an array of so many bytes.

        Sums of 16-bit floats are twice as wide between nodes: of two ranks no gain.
        """
        if nbytes < self.hierarchy_bytes or self._near < (3 if half_sums else 2):
            return None
        if self._hierarchy is None:
            self._hierarchy = Hierarchy(self.mpi, self._near, self.chunk_bytes)
        return self._hierarchy

    def _in_steps(
        self, handle: Handle, steps: Steps, finish: Callable[[], Array]
    ) -> Handle:
        """Launch the first step; the others follow."""
        first = chain.from_iterable(islice(steps, 1))
        return handle.launch(first, finish, follow=((None, step) for step in steps))

    def _together(self, handle: Handle, work: Callable[[], None], x: Array) -> Handle:
        """Let all ranks do ``work``, which makes ``x``, in their shared memory."""
        todo = Work(handle.op, x.nbytes, work)
        follow = (self._desk.follow(one) for one in [todo])
        return handle.launch([self._desk.start(todo)], lambda: x, follow=follow)

    @contextmanager
    def _inside(self, op: str) -> Iterator[Any]:
        """Time and watch a collective without an array; with a bell, all meet first."""
        tally = self.counters.tally(self.name, op)
        began = time.perf_counter()
        self._log.current = self._collectives.enter(op, 0, began)
        try:
            if self._bell is not None:
                gate = self.mpi.Ibarrier()
                self._bell.ring(self.members)
                self._bell.wait([gate], None, ROUNDS)
            yield tally
        finally:
            self._log.current = None
            spent = time.perf_counter() - began
            tally.seconds += spent
            tally.wait += spent


def _deliver(result: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return result
    out[...] = result
    return out
