"""What the counters say of each operation."""

import numpy as np
import pytest

from mpipar.comm import Communicator, Counters


def counted(axis, op, *args, **kwargs):
    """Bytes and calls of one operation on this rank."""
    before = axis.counters.snapshot()
    getattr(axis, op)(*args, **kwargs)
    (name, row), = axis.counters.since(before)[axis.name].items()  # fmt: skip
    assert name == op
    return row["calls"], row["bytes"]


@pytest.mark.mpi(4)
def test_bytes_follow_the_bandwidth_optimal_formula(comm):
    axis = Communicator(comm, "tp", Counters())
    n, r, x = 4, axis.rank, np.zeros((8, 6))
    size = x.nbytes
    assert counted(axis, "all_reduce", x) == (1, 2 * 3 * size // n)
    assert counted(axis, "all_gather", x) == (1, 3 * size)
    assert counted(axis, "reduce_scatter", x) == (1, 3 * size // n)
    assert counted(axis, "all_to_all", x) == (1, 3 * size // n)
    assert counted(axis, "broadcast", x, root=2) == (1, size if r == 2 else 0)
    ring = (r + 1) % n, x.copy(), (r - 1) % n
    assert counted(axis, "send_recv", x, *ring) == (1, size)
    assert counted(axis, "barrier") == (1, 0)
    if r < 2:
        op = "recv" if r else "send"
        assert counted(axis, op, x, 1 - r) == (1, 0 if r else size)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("items", [0, 1, 3, 5, 7, 9])
def test_uneven_sizes_count_what_a_ring_sends(comm, items):
    axis = Communicator(comm, "tp", Counters())
    x = np.zeros(items, "f4")
    _, mine = counted(axis, "all_reduce", x)
    assert comm.allreduce(mine) == 2 * 3 * x.nbytes
    counts = [items, 0, 2, 1]
    _, mine = counted(axis, "all_gather", np.zeros(counts[axis.rank], "f4"), counts)
    assert mine == 4 * (sum(counts) - counts[(axis.rank + 1) % 4])
    _, mine = counted(axis, "reduce_scatter", np.zeros(items + 3, "f4"), counts)
    assert mine == 4 * (items + 3 - counts[axis.rank])


@pytest.mark.mpi(4)
def test_seconds_and_waits_are_told_apart_by_axis_and_operation(comm):
    counters = Counters()
    tp, dp = Communicator(comm, "tp", counters), Communicator(comm, "dp", counters)
    x = np.zeros(1000)
    tp.all_reduce(x)
    before = counters.snapshot()
    handle = dp.all_reduce_start(x)
    assert counters.since(before)["dp"]["all_reduce"]["calls"] == 1
    handle.wait()
    tp.all_gather(x.reshape(10, 100).T)
    table = counters.since(before)
    assert set(table) == {"tp", "dp"} and set(table["tp"]) == {"all_gather"}
    for row in (table["dp"]["all_reduce"], table["tp"]["all_gather"]):
        assert 0 < row["wait"] <= row["seconds"]
    assert counters.since(counters.snapshot()) == {}
