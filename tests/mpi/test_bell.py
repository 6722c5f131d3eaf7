"""Ranks that sleep while they wait are woken, and miss nothing where they are not."""

import time

import numpy as np
import pytest

from mpipar.comm import Communicator, Counters, communicator
from mpipar.comm.bell import Bell, Pause


@pytest.fixture
def axis(comm):
    ringing = Bell(comm)
    yield Communicator(comm, "pp", Counters(), bell=ringing)
    ringing.close()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("asleep", ["receiver", "sender"])
def test_a_sleeping_rank_is_woken(axis, asleep, monkeypatch):
    """A receiver by the message; a synchronous sender by the one who takes it."""
    monkeypatch.setattr(communicator, "MESSAGES", Pause(0.0, 20.0, 20.0))
    monkeypatch.setattr(Communicator, "synchronous", asleep == "sender")
    began = time.monotonic()
    if axis.rank == 0:
        time.sleep(0.3 if asleep == "receiver" else 0)
        axis.send(np.ones(8), 1)
    else:
        time.sleep(0.3 if asleep == "sender" else 0)
        assert np.all(axis.recv(np.zeros(8), 0) == 1)
    assert time.monotonic() - began < 15


@pytest.mark.mpi(3)
def test_a_waiting_rank_leaves_its_core_to_others(axis):
    x = np.zeros(100_000)
    if axis.rank == 0:
        time.sleep(1)
    used = time.process_time()
    axis.broadcast(x)
    axis.all_reduce(x)
    assert time.process_time() - used < 0.2


@pytest.mark.mpi(3)
def test_ranks_that_hear_no_bell_still_get_their_messages(axis):
    """As on another node, or in another container."""
    axis._bell._names = ["\0mpipar-nobody"] * 3
    x = np.full(100_000, 1.0 + axis.rank)
    for _ in range(5):
        out = axis.send_recv(x, (axis.rank + 1) % 3, x.copy(), (axis.rank - 1) % 3)
        assert np.all(out == 1 + (axis.rank - 1) % 3)
        assert np.all(axis.all_reduce(out) == 6)
        assert axis.all_gather_obj(axis.rank) == [0, 1, 2]


@pytest.mark.mpi(2)
def test_ringing_one_who_does_not_listen_blocks_nobody(axis):
    if axis.rank == 0:
        for _ in range(10_000):
            axis._bell.ring([0, 1])
    axis.barrier()
    assert np.all(axis.all_reduce(np.ones(3)) == 2)
