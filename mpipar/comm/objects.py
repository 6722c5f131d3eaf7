"""Pickled objects between the ranks of an axis, for set-up only."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from mpipar.comm import mpi


class Objects:
    """Collectives on any objects, which are watched but not counted."""

    mpi: mpi.Comm

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

    def _inside(self, op: str) -> AbstractContextManager:
        raise NotImplementedError
