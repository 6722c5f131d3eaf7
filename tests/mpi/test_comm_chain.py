"""Rings and chains of messages, with and without MPI's buffers."""

import numpy as np
import pytest

from mpipar.comm import Communicator, Counters

SIZES = [1 << 10, 1 << 16, 1 << 22]


@pytest.fixture(params=["buffered", "synchronous"])
def axis(comm, bell, request, monkeypatch):
    monkeypatch.setattr(Communicator, "synchronous", request.param == "synchronous")
    return Communicator(comm, "pp", Counters(), bell=bell)


def ring(axis, nbytes):
    """Hand every rank's array once around."""
    x = np.full(nbytes, axis.rank, np.uint8)
    for hop in range(1, axis.size + 1):
        out = np.empty_like(x)
        axis.send_recv(x, (axis.rank + 1) % axis.size, out, (axis.rank - 1) % axis.size)
        assert np.all(out == (axis.rank - hop) % axis.size)
        x = out


def pipeline(axis, nbytes, micro_batches=3):
    """Activations down and gradients back up, one forward one backward."""
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    sends, done = [], {"F": 0, "B": 0}

    def forward():
        x = np.full(nbytes, done["F"], np.uint8)
        if not first:
            x[...] = 255
            axis.recv(x, axis.rank - 1, tag=1)
        assert np.all(x == done["F"])
        if not last:
            sends.append(axis.send_start(x, axis.rank + 1, tag=1))
        done["F"] += 1

    def backward():
        dx = np.full(nbytes, 100 + done["B"], np.uint8)
        if not last:
            dx[...] = 255
            axis.recv(dx, axis.rank + 1, tag=2)
        assert np.all(dx == 100 + done["B"])
        if not first:
            sends.append(axis.send_start(dx, axis.rank - 1, tag=2))
        done["B"] += 1

    warm = min(axis.size - 1 - axis.rank, micro_batches)
    for _ in range(warm):
        forward()
    for _ in range(micro_batches - warm):
        forward()
        backward()
    for _ in range(warm):
        backward()
    for send in sends:
        send.wait()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("pattern", [ring, pipeline])
def test_two_ranks_never_rely_on_buffers(axis, pattern, nbytes):
    """A23"""
    pattern(axis, nbytes)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("pattern", [ring, pipeline])
def test_four_ranks_never_rely_on_buffers(axis, pattern, nbytes):
    """A23"""
    pattern(axis, nbytes)


@pytest.mark.mpi(2)
def test_messages_with_one_tag_keep_their_order_and_tags_do_not_mix(axis):
    other = 1 - axis.rank
    sends = [
        axis.send_start(np.full(1 << 15, 10 * tag + i), other, tag)
        for tag in (1, 2)
        for i in range(3)
    ]
    for tag in (2, 1):
        for i in range(3):
            got = axis.recv(np.empty(1 << 15, int), other, tag)
            assert np.all(got == 10 * tag + i)
    for send in sends:
        send.wait()
