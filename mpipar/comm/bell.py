"""Waiting for others without holding a core, for ranks that outnumber the cores.

A rank that waits inside MPI spins, and takes its core from the rank it waits for.
Launchers that make every rank a session of its own (Hydra) let it keep that core even
if it yields, as Linux shares cores between sessions. So a polite rank sleeps instead,
and whoever posts an operation wakes the others of it by an empty datagram.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

from mpipar.comm import mpi


class Pause(NamedTuple):
    """How long to sleep: so much of the time already waited, within these limits."""

    share: float
    shortest_s: float
    longest_s: float


# The bell tells all about a message, but nothing about the inner rounds of a collective
MESSAGES = Pause(0.1, 1e-4, 5e-3)
ROUNDS = Pause(0.05, 2e-5, 1e-3)


class Bell:
    """The bells of all ranks of ``world``; made by them together, ``close`` ends it.

    Other nodes, and containers with a network of their own, hear nothing: their sleeps
    end by time, as all do where the system has no abstract sockets.
    """

    def __init__(self, world: mpi.Comm) -> None:
        self._rank: int = world.rank
        token = world.bcast(secrets.token_hex(8))
        # Abstract names: there is no file, and the name goes with the process
        self._names = [f"\0mpipar-{token}-{rank}" for rank in range(world.size)]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            self._socket.bind(self._names[self._rank])
        world.Barrier()

    def ring(self, members: Iterable[int]) -> None:
        """Wake those of these ranks that sleep, the own one left out."""
        for rank in members:
            if rank != self._rank:
                # Not there, or it has not even heard the earlier ones
                with contextlib.suppress(OSError):
                    self._socket.sendto(b"", self._names[rank])

    def wait(
        self,
        requests: list[mpi.Request],
        statuses: list[mpi.Status] | None,
        pause: Pause,
    ) -> None:
        """Complete all requests, and sleep meanwhile."""
        began = time.perf_counter()
        while not mpi.Request.Testall(requests, statuses):
            seconds = pause.share * (time.perf_counter() - began)
            if self._sleep(min(max(seconds, pause.shortest_s), pause.longest_s)):
                began = time.perf_counter()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _sleep(self, seconds: float) -> bool:
        """Sleep until the bell rings, but not longer than that; True if it rang."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
