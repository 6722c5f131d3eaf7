"""Arrays in shared memory: the same results as by messages, without a trace."""

import gc
import os
import random
import time
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from mpipar.comm import Communicator, Counters, shared
from mpipar.errors import ShapeError
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops
from mpipar.zero.flat import FlatState
from mpipar.zero.gradients import BucketedGradients, Partials

SIZES = [5, 1000, 70001]


@pytest.fixture
def axis(comm, bell, monkeypatch):
    """A communicator for which no array is too small to be shared."""
    monkeypatch.setattr(shared, "SHARED_BYTES", 1)
    monkeypatch.setattr(shared, "_BLOCK_BYTES", 1 << 12)
    axis = Communicator(comm.Dup(), "dp", Counters(), bell=bell)
    yield axis
    axis.free()


def drawn(rank, size, dtype="f4"):
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


def total(draws):
    """The sum in rank order, as every rank must have it to the bit."""
    return list(accumulate(draws))[-1]


def filled(axis, size, dtype="f4"):
    x = axis.shared_zeros(size, dtype)
    assert shared.segment_of(x, axis.mpi) is not None
    assert x.shape == (size,) and not x.any()
    assert x[1:3].base is x  # as in private memory, where parts are joined by it
    x[...] = drawn(axis.rank, size, dtype)
    return x


def check_sums(axis):
    for dtype in ("f4", "f8"):
        for size in SIZES:
            x = filled(axis, size, dtype)
            draws = [drawn(rank, size, dtype) for rank in range(axis.size)]
            assert axis.all_reduce(x) is x
            np.testing.assert_array_equal(x, total(draws))
            x[...] = draws[axis.rank]
            np.testing.assert_array_equal(axis.all_reduce(x, "max"), np.max(draws, 0))


@pytest.mark.mpi(2)
def test_two_ranks_hold_the_sum_in_rank_order(axis):
    check_sums(axis)


@pytest.mark.mpi(3)
def test_three_ranks_hold_the_sum_in_rank_order(axis):
    check_sums(axis)


@pytest.mark.mpi(4)
def test_four_ranks_hold_the_sum_in_rank_order(axis):
    check_sums(axis)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("counts", [None, [1, 0, 8]])
def test_rows_are_scattered_and_gathered_in_place(axis, counts):
    lengths = counts or [3, 3, 3]
    x = filled(axis, 9 * 500).reshape(9, 500)
    begin = sum(lengths[: axis.rank])
    own = slice(begin, begin + lengths[axis.rank])
    right = total([drawn(rank, 9 * 500) for rank in range(3)]).reshape(9, 500)
    np.testing.assert_array_equal(axis.reduce_scatter(x, counts), right[own])
    np.testing.assert_array_equal(x[own], drawn(axis.rank, x.size).reshape(9, 500)[own])
    assert axis.reduce_scatter(x, counts, x[own]).base is x.base
    np.testing.assert_array_equal(x[own], right[own])
    assert axis.all_gather(x[own], counts, out=x) is x
    np.testing.assert_array_equal(x, right)
    x[...] = 0
    axis.all_gather(right[own], counts, out=x)
    np.testing.assert_array_equal(x, right)


@pytest.mark.mpi(3)
def test_private_arrays_take_the_same_calls(comm):
    axis = Communicator(comm, "dp", Counters())
    x = np.zeros((6, 2)) + axis.rank
    out = x[2 * axis.rank : 2 * axis.rank + 2]
    assert axis.reduce_scatter(x, out=out) is out and np.all(out == 3)
    assert axis.all_gather(out, out=x) is x and np.all(x == 3)
    for wrong in (np.zeros((6, 3)), np.zeros((6, 2), "f4"), np.zeros((2, 6)).T):
        with pytest.raises(ShapeError, match=r"out must be a contiguous \(6, 2\)"):
            axis.all_gather(out, out=wrong)


@pytest.mark.mpi(3)
def test_stretches_are_reduced_each_by_itself(axis):
    """Started in turn, finished in another order on each rank, by wait and by test."""
    x = filled(axis, 5000)
    right = total([drawn(rank, 5000) for rank in range(3)])
    stretches = [x[at : at + 700] for at in range(300, 4500, 700)]
    handles = [axis.all_reduce_start(stretch) for stretch in stretches]
    random.Random(axis.rank).shuffle(handles)
    while not handles[0].test():
        time.sleep(1e-4)
    for handle in handles:
        handle.wait()
    assert all(handle.test() for handle in handles)
    np.testing.assert_array_equal(x[300:4500], right[300:4500])
    np.testing.assert_array_equal(x[:300], drawn(axis.rank, 5000)[:300])
    np.testing.assert_array_equal(x[4500:], drawn(axis.rank, 5000)[4500:])


@pytest.mark.mpi(3)
def test_strided_and_small_arrays_go_by_messages(axis, monkeypatch):
    x = axis.shared_zeros(1000, "f8")
    assert shared.segment_of(x[::2], axis.mpi) is None
    assert shared.segment_of(x.copy(), axis.mpi) is None
    x[...] = axis.rank
    assert np.all(axis.all_reduce(x[::2]) == 3) and np.all(x[1::2] == axis.rank)
    monkeypatch.setattr(shared, "SHARED_BYTES", 1 << 20)
    assert shared.segment_of(x, axis.mpi) is None


@pytest.mark.mpi(4)
def test_no_rank_changes_what_another_still_reads(axis):
    """Buckets over many steps, each rank now and then late at any point."""
    x = axis.shared_zeros(20000, "f4")
    late = random.Random(axis.rank)

    def pause():
        if late.random() < 0.3:
            time.sleep(late.random() * 3e-3)

    for step in range(25):
        x[...] = step * (axis.rank + 1)
        pause()
        handles = []
        for at in range(0, 20000, 4000):
            handles.append(axis.all_reduce_start(x[at : at + 4000]))
            pause()
            handles[0].test()
        for handle in handles:
            handle.wait()
        assert np.all(x == 10 * step)
        pause()


@pytest.mark.mpi(3)
def test_shared_and_private_arrays_count_alike(axis):
    private = np.zeros(1001, "f4")
    tables = []
    for x in (axis.shared_zeros(1001, "f4"), private):
        before = axis.counters.snapshot()
        axis.all_reduce(x)
        axis.reduce_scatter(x, [1000, 0, 1])
        axis.all_gather(x[: [1, 990, 10][axis.rank]], [1, 990, 10], x)
        tables.append(axis.counters.since(before)["dp"])
        for row in tables[-1].values():
            assert row.pop("wait") <= row.pop("seconds")
    assert tables[0] == tables[1]
    assert set(tables[0]) == {"all_reduce", "reduce_scatter", "all_gather"}


def inject_no_file(monkeypatch):
    def refuse(name):
        raise OSError("injected")

    monkeypatch.setattr(os, "memfd_create", refuse)


def inject_other_container(monkeypatch):
    """The process of that number here has a file of the name, but not the right one."""
    attach = shared._attach
    monkeypatch.setattr(
        shared, "_attach", lambda pid, file, token, n: attach(pid, file, b"x" * 16, n)
    )


def inject_other_node(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 2**31 - 1)


@pytest.mark.mpi(3)
@pytest.mark.parametrize(
    "inject", [inject_no_file, inject_other_container, inject_other_node]
)
def test_all_ranks_take_private_memory_when_one_cannot_share(axis, inject, monkeypatch):
    with monkeypatch.context() as patch:
        if axis.rank == 1:
            inject(patch)
        x = axis.shared_zeros(100, "f4")
    assert shared.segment_of(x, axis.mpi) is None
    x += axis.rank
    assert np.all(axis.all_reduce(x) == 3)
    assert not traces()


@pytest.mark.mpi(3)
def test_ranks_that_ask_for_different_sizes_all_hear_of_it(axis):
    with pytest.raises(ShapeError, match=r"\[400, 404, 408\] bytes"):
        axis.shared_zeros(100 + axis.rank, "f4")
    assert not traces()


def traces():
    """Open files and mappings of shared arrays in this process."""
    gc.collect()
    files = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    links = [str(file.readlink()) for file in files if file.is_symlink()]
    maps = Path("/proc/self/maps").read_text().split("\n")
    return [line for line in links + maps if "memfd:mpipar" in line]


def named():
    """Named shared memory that this process has mapped: none but MPI's own."""
    maps = Path("/proc/self/maps").read_text().split("\n")
    return {line.split()[-1] for line in maps if "/dev/shm/" in line}


@pytest.mark.mpi(3)
def test_nothing_is_left_of_an_array_that_is_gone(axis):
    before = named()
    x = filled(axis, 1000)
    view = axis.all_reduce(x[10:90].reshape(8, 10))
    assert named() == before
    held = traces()
    assert len(held) >= 3
    del x
    assert traces() == held
    np.testing.assert_array_equal(
        view.reshape(-1), total([drawn(r, 1000) for r in range(3)])[10:90]
    )
    del view
    assert not traces()


@pytest.mark.mpi(2)
def test_gradients_lie_in_shared_memory_and_are_reduced_there(axis):
    box = (0, 50), (0, 3)
    units = [[Parameter(f"p{i}", (50, 3), box, "zeros")] for i in range(4)]
    flat = FlatState(units, Ops(), axis)
    assert shared.segment_of(flat.grad, axis.mpi) is not None
    sums = BucketedGradients(flat, axis, Partials({}, np), bucket_bytes=2000)
    for step in range(3):
        flat.grad[...] = 0
        for index in (3, 2, 1, 0):
            units[index][0].grad += (axis.rank + 1) * (index + step)
            sums.done(index, last=True)
        sums.finish()
        for index in range(4):
            assert np.all(units[index][0].grad == 3 * (index + step))
