"""Arrays that all ranks of an axis on one node can read and write.

Each rank puts its array in an anonymous file of its own and maps those of the others
through /proc. Nothing has a name in /dev/shm, whose size does not matter either, and a
mapping goes with the last array on it: nothing is left over, however a rank ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from mpipar.comm import mpi
from mpipar.comm.calls import Call, Channel
from mpipar.errors import ShapeError
from mpipar.ops.half import add_up, is_half

# From here on it gains with either MPI library. Fixed, not measured at run
# time: the order of a sum, and so its last bits, depends on the way that is taken.
SHARED_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 17  # a block of every rank stays in the cache between two passes
_NAME = "mpipar"
_TOKEN_BYTES = 16


class Segment:
    """The memory of each rank of ``comm``, seen from one; arrays on it keep it alive.

    To NumPy it is the own part, an array of ``dtype``.

    parts   (bytes,) of each rank, by rank
    """

    def __init__(
        self, comm: mpi.Comm, parts: list[np.ndarray], dtype: np.dtype
    ) -> None:
        self.comm = comm
        self.parts = parts
        self.__array_interface__ = parts[comm.rank].view(dtype).__array_interface__

    def parts_at(self, x: np.ndarray) -> list[np.ndarray]:
        """Return every rank's flat array at the place of ``x``, which lies in here."""
        begin = _address(x) - self.__array_interface__["data"][0]
        return [part[begin : begin + x.nbytes].view(x.dtype) for part in self.parts]


def segment_of(x: object, comm: mpi.Comm) -> Segment | None:
    """Return the segment of ``comm`` that holds ``x``, if the shared way is for it."""
    if not isinstance(x, np.ndarray) or x.nbytes < SHARED_BYTES:
        return None
    base = x.base
    while isinstance(base, np.ndarray):
        base = base.base
    fits = isinstance(base, Segment) and base.comm is comm and x.flags.c_contiguous
    return base if fits else None


def share(comm: mpi.Comm, size: int, dtype: np.dtype) -> Segment | None:
    """Return (size,) zeros that all ranks of ``comm`` share; None on all if one cannot.

    Raises ShapeError on all ranks unless all ask for equally many bytes.
    """
    nbytes = size * dtype.itemsize
    token = secrets.token_bytes(_TOKEN_BYTES)
    file, own = _create(nbytes, token)
    try:
        offers = comm.allgather((os.getpid(), file, token, nbytes))
        sizes = [offer[3] for offer in offers]
        if len(set(sizes)) > 1:
            raise ShapeError(f"shared arrays differ among ranks: {sizes} bytes")
        parts = [
            own if rank == comm.rank else _attach(*offer)
            for rank, offer in enumerate(offers)
        ]
        if not comm.allreduce(all(part is not None for part in parts), mpi.LAND):
            return None
        own[:_TOKEN_BYTES] = 0
        return Segment(comm, [part[:nbytes] for part in parts], dtype)
    finally:
        if file is not None:
            os.close(file)


def _create(nbytes: int, token: bytes) -> tuple[int | None, np.ndarray | None]:
    """Make an anonymous file with ``token`` at its beginning, zeros behind it."""
    file = None
    try:
        file = os.memfd_create(_NAME)
        # Claim the pages: a lack of memory is then an error, not a bus error later
        os.posix_fallocate(file, 0, max(nbytes, _TOKEN_BYTES))
        own = _map(file)
    except (OSError, ValueError, AttributeError):  # no memory, or not Linux
        return file, None
    own[:_TOKEN_BYTES] = np.frombuffer(token, np.uint8)
    return file, own


def _attach(pid: int, file: int | None, token: bytes, nbytes: int) -> np.ndarray | None:
    """Map the file of another process; None unless it is there and the right one."""
    path = f"/proc/{pid}/fd/{file}"
    try:
        # Another node, or another container here, has another process of that number
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        peer = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            part = _map(peer)
        finally:
            os.close(peer)
    except (OSError, ValueError):
        return None
    same = part.size >= nbytes and part[:_TOKEN_BYTES].tobytes() == token
    return part if same else None


def _map(file: int) -> np.ndarray:
    # Up to Python 3.12 mmap keeps a duplicate of the file open as long as it lives
    return np.frombuffer(mmap.mmap(file, 0), np.uint8)


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


class Work:
    """One operation on shared arrays: done by ``run`` once all ranks have come."""

    def __init__(self, op: str, nbytes: int, run: Callable[[], None]) -> None:
        self.op, self.nbytes, self.run = op, nbytes, run
        self.call: Call | None = None
        self.departure: mpi.Request | None = None


class Desk:
    """Does the works of one axis in the order in which they were started.

    A work lies between two barriers: one when the arrays of all ranks are ready, one
    when nobody needs them any more. Each kind has a communicator of its own, as a rank
    may start its next work before the last one, and another one after it.
    """

    def __init__(self, comm: mpi.Comm, departures: Channel) -> None:
        self._arrival = comm
        self._departure = comm.Dup()
        self._departures = departures
        self._queue: deque[Work] = deque()

    def start(self, work: Work) -> mpi.Request:
        """Queue ``work``; its request is complete when all ranks have started it."""
        self._queue.append(work)
        return self._arrival.Ibarrier()

    def follow(self, work: Work) -> tuple[Call, list[mpi.Request]]:
        """Do ``work``, whose first request is complete, and what came before it.

        Return the call and the requests that complete when all ranks have done it.
        """
        while work.departure is None:
            first = self._queue.popleft()
            first.run()
            now = time.perf_counter()
            first.call = self._departures.enter(first.op, first.nbytes, now)
            first.departure = self._departure.Ibarrier()
        return work.call, [work.departure]

    def free(self) -> None:
        """Free the communicator; collective."""
        self._departure.Free()


def all_reduce(
    parts: Sequence[np.ndarray], rank: int, bounds: Sequence[int], op: str
) -> None:
    """Reduce the own stretch of all ``parts`` in rank order, and put it in all of them.

    Elements bounds[rank] to bounds[rank + 1] are read and written by this rank alone,
    so all ranks can do this at the same time, and then hold the same bits.
    """
    first, *others = parts
    half = is_half(first.dtype)
    for piece in _blocks(bounds[rank], bounds[rank + 1], first.itemsize):
        total = first[piece]
        if half:
            add_up([part[piece] for part in parts], total)
        else:
            for other in others:
                _OPERATIONS[op](total, other[piece], out=total)
        for other in others:
            other[piece] = total


def reduce_scatter(
    parts: Sequence[np.ndarray], rank: int, bounds: Sequence[int], out: np.ndarray
) -> None:
    """Sum the own stretch of all ``parts`` in rank order into ``out``.

    ``out`` may be that stretch of the own part; 16-bit floats may go to float32.
    """
    begin = bounds[rank]
    if is_half(parts[0].dtype):
        stretch = slice(begin, bounds[rank + 1])
        add_up([part[stretch] for part in parts], out)
        return
    scratch = np.empty(_BLOCK_BYTES // out.itemsize, out.dtype)
    for piece in _blocks(begin, bounds[rank + 1], out.itemsize):
        total = scratch[: piece.stop - piece.start]
        total[...] = parts[0][piece]
        for other in parts[1:]:
            np.add(total, other[piece], out=total)
        out[piece.start - begin : piece.stop - begin] = total


def all_gather(parts: Sequence[np.ndarray], rank: int, bounds: Sequence[int]) -> None:
    """Fill the own part with the stretch of each other rank from its part."""
    for other, part in enumerate(parts):
        if other != rank:
            stretch = slice(bounds[other], bounds[other + 1])
            parts[rank][stretch] = part[stretch]


def bounds_of(lengths: Sequence[int]) -> list[int]:
    """Return where each stretch begins, and where the last one ends."""
    return list(accumulate(lengths, initial=0))


def _blocks(begin: int, end: int, itemsize: int) -> list[slice]:
    step = _BLOCK_BYTES // itemsize
    return [slice(at, min(at + step, end)) for at in range(begin, end, step)]


_OPERATIONS = {"sum": np.add, "max": np.maximum}
