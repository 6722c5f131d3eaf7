"""Messages larger than one MPI call may carry."""

import numpy as np
import pytest

from mpipar.comm import Communicator, Counters

SIZE = 2_500_001


@pytest.fixture
def axis(comm, monkeypatch):
    monkeypatch.setattr(Communicator, "chunk_bytes", 1 << 20)
    return Communicator(comm, "tp", Counters())


def marked(rank):
    """Bytes that differ at every place and on every rank."""
    return ((np.arange(SIZE) + 7 * rank) % 251).astype(np.uint8)


@pytest.mark.mpi(2)
def test_large_arrays_arrive_in_pieces(axis):
    """A21: 2,500,001 bytes under a limit of 1 MiB, in every operation."""
    r = axis.rank
    x, other = marked(r), marked(1 - r)
    both = [marked(0), marked(1)]
    out = np.empty_like(x)
    axis.send_recv(x, 1 - r, out, 1 - r)
    assert np.array_equal(out, other)
    assert np.array_equal(axis.broadcast(x.copy(), root=1), both[1])
    assert np.array_equal(axis.all_gather(x), np.concatenate(both))
    counts = [SIZE, 3]
    gathered = axis.all_gather(x[: counts[r]], counts)
    assert np.array_equal(gathered, np.concatenate([both[0], both[1][:3]]))
    total = both[0].astype("i8") + both[1]
    assert np.array_equal(axis.all_reduce(x.astype("i8")), total)
    counts = [SIZE - 5, 5]
    own = axis.reduce_scatter(x.astype("i8"), counts)
    assert np.array_equal(own, np.split(total, [SIZE - 5])[r])
    halves = [part.reshape(2, -1) for part in (both[0][1:], both[1][1:])]
    turned = axis.all_to_all(x[1:].reshape(2, -1))
    assert np.array_equal(turned, np.stack([halves[0][r], halves[1][r]]))


@pytest.mark.mpi(2)
def test_large_arrays_arrive_by_started_operations(axis):
    r = axis.rank
    x = marked(r)
    out, total = np.empty_like(x), x.astype("i8")
    handles = [
        axis.recv_start(out, 1 - r),
        axis.send_start(x, 1 - r),
        axis.all_reduce_start(total),
        axis.all_gather_start(x),
        axis.reduce_scatter_start(x.astype("i4"), [SIZE - 5, 5]),
    ]
    results = [handle.wait() for handle in handles]
    summed = marked(0).astype("i8") + marked(1)
    assert np.array_equal(out, marked(1 - r))
    assert np.array_equal(total, summed)
    assert np.array_equal(results[3], np.concatenate([marked(0), marked(1)]))
    assert np.array_equal(results[4], np.split(summed, [SIZE - 5])[r])


@pytest.mark.full
@pytest.mark.mpi(2, timeout=120)
def test_more_than_two_to_the_31_bytes(comm):
    """A21: 2**31 + 8 bytes, markers in byte 2**31 and the last one."""
    axis = Communicator(comm, "tp", Counters())
    x = np.zeros(2**31 + 8, np.uint8)
    if axis.rank == 0:
        x[0], x[2**31], x[-1] = 11, 12, 13
    axis.broadcast(x)
    assert (x[0], x[2**31], x[-1]) == (11, 12, 13)
    assert int(x[1 : 2**31].max()) == 0
