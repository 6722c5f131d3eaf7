"""Debug mode: the ranks of an axis compare what they are about to call.

A mismatch that MPI answers with a hang, or with wrong numbers, ends the run before it
is made, with what each rank called and where. It costs one more exchange a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm import mpi
from mpipar.comm.communicator import Communicator
from mpipar.comm.counters import Counters
from mpipar.comm.handle import Handle
from mpipar.comm.posts import Poster
from mpipar.comm.shapes import Routes
from mpipar.comm.sources import own_line
from mpipar.comm.transport import Array
from mpipar.errors import CommError

_NOTE_BYTES = 512
_LINE_LETTERS = 300


class Said(NamedTuple):
    """What one rank is about to call.

    what     all that must be the same on all ranks
    routes   rows that go to each rank and that come from each, where these differ
    """

    op: str
    what: str
    where: str
    routes: tuple[list[int], list[int]] | None = None


class CheckedCommunicator(Communicator):
    """A Communicator whose calls are compared among its ranks before they are made.

    Collectives wait for all ranks when they begin, ``_start`` forms too: those of all
    axes must begin in one order on all ranks. A message brings a note of its size,
    type and source line. Raises CommError on all ranks of a collective that differs,
    and on the receiver of a message.
    """

    def __init__(self, comm: mpi.Comm, name: str, *args: Any, **options: Any) -> None:
        super().__init__(comm, name, *args, **options)
        # Watched, but not counted
        options = {"log": self._log, "members": self.members, "bell": self._bell}
        self._checks = Communicator(
            comm.Dup(), f"{name} (check)", Counters(), **options
        )

    def broadcast(self, x: Array, root: int = 0) -> Array:
        self._compare("broadcast", f"{x.size} {x.dtype} from rank {root}")
        return super().broadcast(x, root)

    def barrier(self) -> None:
        self._compare("barrier", "")
        super().barrier()

    def shared_zeros(self, size: int, dtype: DTypeLike) -> np.ndarray:
        self._compare("shared_zeros", f"{size} {np.dtype(dtype)}")
        return super().shared_zeros(size, dtype)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        self._compare("gather_obj", f"to rank {root}")
        return super().gather_obj(obj, root)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self._compare("all_gather_obj", "")
        return super().all_gather_obj(obj)

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        self._compare("broadcast_obj", f"from rank {root}")
        return super().broadcast_obj(obj, root)

    def free(self) -> None:
        self._checks.free()
        super().free()

    def _all_reduce(self, x: Array, op: str, poster: Poster) -> Handle:
        self._compare("all_reduce", f"{op} of {x.size} {x.dtype}")
        return super()._all_reduce(x, op, poster)

    def _all_gather(
        self, x: Array, counts: Sequence[int] | None, out: Array, poster: Poster
    ) -> Handle:
        # With counts each rank brings rows of its own number
        rows = f"{x.shape}" if counts is None else f"{list(counts)} of {x.shape[1:]}"
        self._compare("all_gather", f"{rows} {x.dtype}")
        return super()._all_gather(x, counts, out, poster)

    def _reduce_scatter(
        self, x: Array, counts: Sequence[int] | None, out: Array, poster: Poster
    ) -> Handle:
        rows = "even" if counts is None else f"{list(counts)}"
        self._compare("reduce_scatter", f"{x.shape} {x.dtype}, {rows} rows")
        return super()._reduce_scatter(x, counts, out, poster)

    def _all_to_all(self, x: Array, counts: Routes | None, poster: Poster) -> Handle:
        shape = x.shape if counts is None else x.shape[1:]
        rows = "even" if counts is None else "counted"
        routes = None if counts is None else tuple(list(map(int, c)) for c in counts)
        self._compare("all_to_all", f"{shape} {x.dtype}, {rows} rows", routes)
        return super()._all_to_all(x, counts, poster)

    def _compare(
        self,
        op: str,
        what: str,
        routes: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """Raise CommError on all ranks unless all are here with the same call."""
        with self._checks._inside(op):
            own = tuple(Said(op, what, own_line(), routes))
            found = [Said(*said) for said in self._checks.mpi.allgather(own)]
        if len({said[:2] for said in found}) > 1:
            reason = "call different operations"
        elif routes is not None and (wrong := _unequal_route(found)):
            reason = f"disagree on rows: {wrong}"
        else:
            return
        number = self._collectives.count + 1
        groups: dict[str, list[int]] = {}
        for member, said in zip(self.members, found, strict=True):
            what = f" ({said.what})" if said.what else ""
            text = f"{said.op} #{number}{what} at {said.where}"
            groups.setdefault(text, []).append(member)
        lines = "".join(
            f"\n  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
            f"{text}"
            for text, ranks in groups.items()
        )
        error = CommError(f"the ranks of axis {self.name} {reason}:{lines}")
        error.speaks = self.rank == 0
        raise error

    # Messages

    def _send(self, x: Array, to: int, tag: int, op: str) -> Handle:
        channel = self._message_channel(self.rank, to, tag)
        flat, handle = self._begin(op, x, x.nbytes, channel)
        note = _note(x)
        first = self._checks.mpi.Isend([note, mpi.BYTE], to, tag)
        posts = chain([first], self._leave(flat, to, tag))
        # The note lives as long as `finish`
        return handle.launch(posts, lambda kept=note: self._sent(flat, x))

    def _recv(self, x: Array, source: int, tag: int, op: str, calls: int = 1) -> Handle:
        channel = self._message_channel(source, self.rank, tag)
        flat, handle = self._begin(op, x, 0, channel, calls)
        note = np.zeros(_NOTE_BYTES, np.uint8)
        first = self._checks.mpi.Irecv([note, mpi.BYTE], source, tag)
        posts, _ = self._arrive(flat, source, tag)
        name = f"{op} #{channel.count} on axis {self.name} ({channel.name})"
        follow = _judged(note, _note(x), name, channel.members, posts)
        return handle.launch([first], lambda: self._put_back(flat, x), follow=follow)


def _judged(
    came: np.ndarray,
    wanted: np.ndarray,
    name: str,
    ends: Sequence[int],
    posts: list[mpi.Request],
) -> Iterator[tuple[None, list[mpi.Request]]]:
    """The message's requests, once its note has come; raise CommError unless it is what
    the receiver expects."""
    (size, dtype, there), (count, kind, here) = _read(came), _read(wanted)
    if (size, dtype) != (count, kind):
        raise CommError(
            f"{name}: rank {ends[0]} sends {size} {dtype} at {there}, rank {ends[1]} "
            f"expects {count} {kind} at {here}"
        )
    yield None, posts


def _note(x: Array) -> np.ndarray:
    """Elements, type and source line of a message, (_NOTE_BYTES,) uint8."""
    said = json.dumps([x.size, str(x.dtype), own_line()[-_LINE_LETTERS:]]).encode()
    return np.frombuffer(said.ljust(_NOTE_BYTES), np.uint8).copy()


def _read(note: np.ndarray) -> list[Any]:
    return json.loads(note.tobytes())


def _unequal_route(found: Sequence[Said]) -> str:
    """A pair of ranks that disagree on the rows from one to the other, or nothing."""
    for sender, (leaving, _) in enumerate(said.routes for said in found):
        for receiver, (_, arriving) in enumerate(said.routes for said in found):
            sent, expected = leaving[receiver], arriving[sender]
            if sent != expected:
                return (
                    f"place {sender} sends {sent} rows to place {receiver}, which "
                    f"expects {expected}"
                )
    return ""
