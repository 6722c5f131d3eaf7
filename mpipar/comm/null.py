"""The communicator of an axis of size 1: same methods, all identities."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.transport import Array
from mpipar.errors import CommError
from mpipar.ops.half import widen


class Finished:
    """A handle whose operation is already complete."""

    __slots__ = ("_result",)

    def __init__(self, result: Array) -> None:
        self._result = result

    def wait(self) -> Array:
        """Return the array."""
        return self._result

    def test(self) -> bool:
        """Return True."""
        return True


class NullCommunicator:
    """One rank alone. Nothing is moved, copied or counted, and MPI is never loaded.

    Collectives return the array they are given, and a ring of one hands its array to
    itself. A lone send or receive has no other end and raises CommError.
    """

    size = 1
    rank = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def all_reduce(self, x: Array, op: str = "sum") -> Array:
        """Return ``x``."""
        return x

    def all_gather(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Array:
        """Return ``x``, or ``out`` filled with it."""
        return _deliver(x, out)

    def reduce_scatter(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Array:
        """Return ``x``, or ``out`` filled with it."""
        return _deliver(x, out)

    def all_to_all(self, x: Array, counts: Any = None) -> Array:
        """Return ``x``."""
        return x

    def all_to_all_start(self, x: Array, counts: Any = None) -> Finished:
        """Return a finished handle of ``x``."""
        return Finished(x)

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Return ``x``."""
        return x

    def all_reduce_start(self, x: Array, op: str = "sum") -> Finished:
        """Return a finished handle of ``x``."""
        return Finished(x)

    def all_gather_start(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Finished:
        """Return a finished handle of ``all_gather``."""
        return Finished(_deliver(x, out))

    def reduce_scatter_start(
        self, x: Array, counts: Sequence[int] | None = None, out: Array = None
    ) -> Finished:
        """Return a finished handle of ``reduce_scatter``."""
        return Finished(_deliver(x, out))

    def send(self, x: Array, to: int, tag: int = 0) -> None:
        """Raise CommError."""
        self._alone()

    def recv(self, x: Array, source: int, tag: int = 0) -> Array:
        """Raise CommError."""
        self._alone()

    def send_recv(
        self, x: Array, to: int, out: Array, source: int, tag: int = 0
    ) -> Array:
        """Copy ``x`` to ``out`` and return it."""
        out[...] = x
        return out

    def send_start(self, x: Array, to: int, tag: int = 0) -> Finished:
        """Raise CommError."""
        self._alone()

    def recv_start(self, x: Array, source: int, tag: int = 0) -> Finished:
        """Raise CommError."""
        self._alone()

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any]:
        """Return [obj]."""
        return [obj]

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return [obj]."""
        return [obj]

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """Return ``obj``."""
        return obj

    def barrier(self) -> None:
        """Return at once."""

    def shared_zeros(self, size: int, dtype: DTypeLike) -> np.ndarray:
        """Return (size,) zeros."""
        return np.zeros(size, dtype)

    def free(self) -> None:
        """Do nothing."""

    def _alone(self) -> None:
        raise CommError(f"axis {self.name} has one rank: there is nobody to message")


def _deliver(x: Array, out: Array) -> Array:
    if out is None:
        return x
    out[...] = x if out.dtype == x.dtype else widen(x)
    return out
