"""What is left of a world when ranks are lost: MPI's user-level failure mitigation.

A rank that hears of a loss revokes all communicators, so that nobody waits any more;
then all that are left agree, and shrink the world to themselves.

Source   Bland et al. 2013 (Post-failure recovery of MPI communication capability)
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from mpipar.comm import mpi
from mpipar.comm.watchdog import end_job
from mpipar.errors import RankLostError

# Set for the ranks by `mpiexec --with-ft ulfm`
_SWITCH = "OMPI_MCA_mpi_ft_enable"
# How long a loss may take to become known after it has done harm
_NOTICE_S = 3.0


def obstacle(env: Mapping[str, str]) -> str | None:
    """Why this job cannot outlive one of its ranks; None where it can.

    env      of the process, as its launcher set it
    """
    name = mpi.get_vendor()[0]
    if name != "Open MPI":
        return f"the MPI library is {name}"
    if env.get(_SWITCH, "").lower() not in ("1", "true", "yes"):
        return "Open MPI's mpiexec was started without --with-ft ulfm"
    return None


@cache
def _family() -> type:
    """The class is made when it is needed: its base is MPI's."""

    class Family(mpi.Intracomm):
        """A communicator that knows all that were made of the same one, and of those.

        What one rank has, all have, or nobody goes on: a rank that could not make it
        does not come to the barrier, and revokes this one.
        """

        members: list[Any]

        def _adopt(self, made: Any) -> Any:
            if made != mpi.COMM_NULL:
                made = _join(made, self.members)
            self.Barrier()
            return made

        def Split(self, color: int = 0, key: int = 0) -> Any:  # noqa: N802
            return self._adopt(super().Split(color, key))

        def Split_type(self, *args: Any) -> Any:  # noqa: N802
            return self._adopt(super().Split_type(*args))

        def Dup(self) -> Any:  # noqa: N802
            return self._adopt(super().Dup())

        def Free(self) -> None:  # noqa: N802
            self.members.remove(self)
            super().Free()

    return Family


def _join(comm: mpi.Comm, members: list[Any]) -> Any:
    made = _family()(comm)
    made.members = members
    members.append(made)
    return made


def found_family(comm: mpi.Comm) -> Any:
    """The same communicator, from which on all that are made can be revoked."""
    return _join(comm, [])


def revoke(world: Any) -> None:
    """Ends all operations on a family's communicators, on all ranks."""
    for comm in world.members:
        comm.Revoke()


def agree(world: Any, is_well: bool) -> bool:
    """True on all ranks that are left if all of them say so; works when revoked."""
    while True:
        world.Ack_failed()
        try:
            return bool(world.Agree(int(is_well)))
        except mpi.Exception as error:
            # Somebody was lost of whom not all knew: all of them hear it, and repeat.
            if error.Get_error_class() != mpi.ERR_PROC_FAILED:
                raise


def shrink(world: Any) -> Any:
    """The ranks that are left, in the same order; collective."""
    return found_family(world.Shrink())


def first_ranks(world: Any, count: int) -> Any:
    """The communicator of the first ranks; None on the others. Collective."""
    is_in = world.rank < count
    made = world.Split(0 if is_in else mpi.UNDEFINED, world.rank)
    return made if is_in else None


@contextmanager
def losses_told(world: Any) -> Iterator[None]:
    """Turns what comes of a lost rank into RankLostError, where `world` is a family.

    An error that all ranks raise together is none of those.
    """
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        is_common = getattr(error, "agreed", False)
        if is_common or not hasattr(world, "members") or not _is_loss(error, world):
            raise
        raise RankLostError(f"a rank was lost: {error}") from error


def _is_loss(error: BaseException, world: Any) -> bool:
    lost = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, mpi.Exception) and cause.Get_error_class() in lost:
            return True
        cause = cause.__cause__ or cause.__context__
    # It may be the harm that a loss has done: wait until that would be known.
    until = time.monotonic() + _NOTICE_S
    while not (world.Is_revoked() or world.Get_failed().size):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
        mpi.COMM_SELF.Iprobe()
    return True


def wait_for_number(world: Any, source: int) -> int:
    """A number of `tell_number`, waited for in sleeps, however long that takes."""
    buffer = bytearray(8)
    request = world.Irecv([buffer, mpi.BYTE], source, 0)
    while not request.Test():
        time.sleep(0.01)
    return int.from_bytes(buffer, "big")


def tell_number(world: Any, number: int, to: range) -> None:
    """Sends a number that is not negative to ranks which wait for it, if they live."""
    for rank in to:
        with suppress(mpi.Exception):
            world.Send([number.to_bytes(8, "big"), mpi.BYTE], rank, 0)


def has_lost(world: Any) -> bool:
    """True where this rank knows that another one has died."""
    return world.Get_failed().size > 0


@contextmanager
def patience(seconds: float, what: str) -> Iterator[None]:
    """Ends the job where what is done in here takes longer: no watchdog sees it."""

    def give_up() -> None:
        sys.__stderr__.write(
            f"mpipar: {what} takes longer than {seconds:g} s.\n"
            "  The job ends now, with exit status 4.\n"
        )
        sys.__stderr__.flush()
        time.sleep(1)  # launchers drop what they have not read when a job aborts
        end_job()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(status: int) -> None:
    """Ends this process of a job that has lost ranks; never returns.

    MPI's own end would wait for them now and then, and does not come back.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
