"""Every operation on arrays of a device gives the numbers that host arrays give.

Ranks share an emulated GPU (`emulator`), whose kernels and copies are late: what was
not waited for is wrong.
"""

import numpy as np
import pytest
from gpu.emulator.path import HERE
from gpu.shim.compile import GXX

from mpipar.comm import Communicator, Counters
from mpipar.comm.device import CheckedDeviceCommunicator, DeviceCommunicator
from mpipar.comm.memory import (
    Direct,
    DirectWindow,
    Pinned,
    Staged,
    StagedWindow,
)
from mpipar.errors import CommError, DeviceError, ShapeError
from mpipar.ops.half import narrow, widen

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

ROADS = ["staged", "cuda_aware", "nccl"]


@pytest.fixture
def cupy(monkeypatch):
    """A machine of four GPUs."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("CUPY_EMULATOR_DEVICES", "4")
    import cupy

    return cupy


@pytest.fixture(params=ROADS)
def axis(comm, cupy, request):
    made = equipped(comm, request.param)
    yield made
    made.free()


def equipped(comm, road, kind=DeviceCommunicator, **options):
    """A communicator for arrays of the emulated device."""
    from mpipar.ops import make_ops

    ops = make_ops("cuda", "bf16", comm.rank)
    memory = Direct(ops) if road == "cuda_aware" else Staged(ops)
    made = kind(comm.Dup(), "dp", Counters(), **options)
    made.use(memory, road == "nccl")
    return made


def value(rank, shape, dtype="f4"):
    """Small whole numbers, whose sums are exact; uint16 are bits of bf16."""
    draw = np.random.default_rng(rank).integers(0, 20, shape)
    if np.dtype(dtype) == np.uint16:
        return narrow(draw.astype("f4"), np.empty(shape, "u2"))
    return np.asarray(draw).astype(dtype)


def late(host):
    """An array on the device; what is in it comes there some time later."""
    import cupy
    import cupyx

    x = cupy.empty(host.shape, host.dtype)
    pinned = cupyx.empty_pinned(host.shape, host.dtype)
    pinned[...] = host
    x.set(pinned)
    return x


def total(whole):
    if whole[0].dtype != np.uint16:
        return sum(whole)
    return narrow(sum(map(widen, whole)), np.empty(whole[0].shape, "u2"))


def same(x, expected):
    np.testing.assert_array_equal(x.get(), expected)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u2"])
@pytest.mark.parametrize("shape", [(6, 5), (3, 700, 8), (0, 4), (3, 0)])
def test_collectives_give_the_numbers_of_host_arrays(axis, dtype, shape):
    n, r = axis.size, axis.rank
    whole = [value(rank, shape, dtype) for rank in range(n)]
    x = late(whole[r])
    assert axis.all_reduce(x) is x
    same(x, total(whole))
    same(axis.all_gather(late(whole[r])), np.concatenate(whole))
    rows = slice(r * shape[0] // n, (r + 1) * shape[0] // n)
    same(axis.reduce_scatter(late(whole[r])), total(whole)[rows])
    parts = [whole[rank][rows] for rank in range(n)]
    same(axis.all_to_all(late(whole[r])), np.concatenate(parts))
    for root in range(n):
        same(axis.broadcast(late(whole[r]), root), whole[root])
    out = late(np.zeros(shape, dtype))
    assert axis.send_recv(late(whole[r]), (r + 1) % n, out, (r - 1) % n) is out
    same(out, whole[(r - 1) % n])
    if dtype != "u2":
        same(axis.all_reduce(late(whole[r]), "max"), np.max(whole, axis=0))


@pytest.mark.mpi(3)
def test_rows_may_be_uneven_and_arrays_have_gaps(axis):
    n, r = axis.size, axis.rank
    counts = [4, 0, 7]
    whole = [value(rank, (counts[rank], 3)) for rank in range(n)]
    same(axis.all_gather(late(whole[r]), counts), np.concatenate(whole))
    full = [value(rank, (11, 3), "u2") for rank in range(n)]
    own = np.split(total(full), [4, 4])[r]
    same(axis.reduce_scatter(late(full[r]), counts), own)
    out = late(np.zeros(own.shape, "f4"))
    assert axis.reduce_scatter(late(full[r]), counts, out) is out
    same(out, np.split(sum(map(widen, full)), [4, 4])[r])

    routes = [[1, 2, 0], [3, 0, 1], [2, 2, 2]]
    arriving = [routes[rank][r] for rank in range(n)]
    rows = [value(rank, (sum(routes[rank]), 3)) for rank in range(n)]
    came = [np.split(rows[k], np.cumsum(routes[k])[:-1])[r] for k in range(n)]
    got = axis.all_to_all(late(rows[r]), (routes[r], arriving))
    same(got, np.concatenate(came))

    square = [value(rank, (4, 6)) for rank in range(n)]
    x = late(square[r]).T
    assert axis.all_reduce(x) is x
    same(x, sum(square).T)
    wide = late(np.zeros((4, 12), "f4"))[:, ::2]
    axis.send_recv(late(square[r]).T.reshape(4, 6), (r + 1) % n, wide, (r - 1) % n)
    same(wide, square[(r - 1) % n].T.reshape(4, 6))
    zero = late(np.array(float(r), "f4"))
    same(axis.all_gather(zero), np.arange(n))

    # In place, as gradients and weights are
    flat = late(square[r].reshape(-1))
    mine = slice(8 * r, 8 * r + 8)
    axis.reduce_scatter(flat, out=flat[mine])
    axis.all_gather(flat[mine], out=flat)
    same(flat, sum(square).reshape(-1))


@pytest.mark.mpi(3)
def test_started_operations_and_late_kernels_between_them(axis, cupy):
    """A26: what is written after a start is not sent; what came is there at wait."""
    n = axis.size
    whole = [value(rank, (6, 50)) for rank in range(n)]
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            started_operations(axis, cupy, whole)


def started_operations(axis, cupy, whole):
    n, r = axis.size, axis.rank
    for round in range(2):
        sums = [late(whole[r] + round) for _ in range(3)]
        got = cupy.empty((6, 50), "f4")
        handles = [axis.recv_start(got, (r - 1) % n, tag=3)]
        handles += [axis.all_reduce_start(x) for x in sums]
        handles.append(axis.all_gather_start(late(whole[r])))
        handles.append(axis.send_start(late(whole[r]), (r + 1) % n, tag=3))
        host = axis.all_reduce(np.ones(3))
        assert host.tolist() == [n] * 3
        while not all(handle.test() for handle in handles[1:4]):
            pass
        for x, handle in zip(sums, handles[1:4], strict=True):
            assert handle.wait() is x
            x += 1
            same(x, sum(whole) + n * round + 1)
        same(handles[4].wait(), np.concatenate(whole))
        handles[5].wait()
        same(handles[0].wait(), whole[(r - 1) % n])


@pytest.mark.mpi(2)
def test_messages_of_many_parts_arrive(comm, cupy, monkeypatch):
    monkeypatch.setattr(Staged, "chunk_bytes", 96)
    monkeypatch.setattr("mpipar.comm.memory.STAGED_BYTES", 64)
    axis = equipped(comm, "staged")
    whole = [value(rank, (77,)) for rank in range(2)]
    out = late(np.zeros(77, "f4"))
    axis.send_recv(late(whole[axis.rank]), 1 - axis.rank, out, 1 - axis.rank)
    same(out, whole[1 - axis.rank])
    same(axis.all_reduce(late(whole[axis.rank])), sum(whole))
    if axis.rank:
        with pytest.raises(CommError, match=r"308 bytes came, 312 expected"):
            axis.recv(late(np.zeros(78, "f4")), 0)
    else:
        axis.send(late(whole[0]), 1)
    axis.free()


@pytest.mark.mpi(3)
@pytest.mark.parametrize("road", ROADS)
def test_calls_are_compared_counted_and_refused(comm, cupy, road):
    checked = equipped(comm, road, CheckedDeviceCommunicator)
    host = Communicator(comm.Dup(), "dp", Counters())
    n, r = checked.size, checked.rank
    x = value(r, (6, 5))
    for axis, make in ((checked, late), (host, np.copy)):
        axis.all_reduce(make(x))
        axis.all_gather(make(x))
        axis.reduce_scatter(make(x))
        axis.all_to_all(make(x))
        axis.broadcast(make(x))
        axis.send_recv(make(x), (r + 1) % n, make(x), (r - 1) % n)
    counted = [
        {op: (t["calls"], t["bytes"]) for op, t in axis.counters.since()["dp"].items()}
        for axis in (checked, host)
    ]
    assert counted[0] == counted[1]
    # Rank 0 compares its next call when others wait for the one before
    x = late(value(r, (6, 5)))
    handle = checked.all_gather_start(x)
    if r:
        handle.wait()
    checked.all_gather(np.ones(1))
    same(handle.wait(), np.concatenate([value(rank, (6, 5)) for rank in range(n)]))
    with pytest.raises(CommError, match="call different operations"):
        checked.all_reduce(late(np.zeros(4 + r, "f4")))
    with pytest.raises(ShapeError, match="4 rows"):
        checked.reduce_scatter(late(np.zeros((4, 2), "f4")))
    with pytest.raises(CommError, match="MPI has no sum of bool"):
        checked.all_reduce(late(np.zeros(4, "?")))
    with pytest.raises(DeviceError, match=r"numpy\.float64"):
        checked.all_reduce(np.float64(1))
    checked.free()
    host.free()


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("road", "kind", "method"),
    [
        ("staged", StagedWindow, "wait"),
        ("staged", StagedWindow, "store"),
        ("staged", Staged, "join"),
        ("staged", None, "wait_event"),
        ("cuda_aware", DirectWindow, "wait"),
        ("nccl", None, "wait_event"),
    ],
)
def test_a_missing_wait_is_seen(comm, cupy, monkeypatch, road, kind, method):
    """Each wait is needed: without it numbers are wrong."""
    monkeypatch.setattr(kind or cupy.cuda.Stream, method, lambda *_: None)
    axis = equipped(comm, road)
    x = late(value(axis.rank, (400,)))
    found = axis.all_reduce(x).get()
    assert not np.array_equal(found, value(0, (400,)) + value(1, (400,)))


def test_pinned_buffers_are_used_again_when_the_device_is_done():
    made, done = [], []

    class Event:
        def __init__(self):
            self.done = False
            done.append(self)

    pool = Pinned(lambda size: made.append(size) or np.empty(size, "u1"), limit=12288)
    first = pool.take(5000)
    assert first.size == 8192 and pool.take(1).size == 4096
    pool.give_back(first, Event())
    assert pool.take(8000) is not first
    done[0].done = True
    assert pool.take(8192) is first
    pool.give_back(first, None)
    pool.give_back(np.empty(8192, "u1"), None)
    assert pool.take(1).size == 4096 and pool.kept == 8192 and len(made) == 4
