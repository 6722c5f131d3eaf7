"""Every operation of the wrapper equals NumPy on the logical arrays."""

import re

import numpy as np
import pytest

from mpipar.comm import Communicator, Counters
from mpipar.errors import CommError, DeviceError, ShapeError

DTYPES = ["f4", "f8", "i1", "i2", "i4", "i8", "u1", "u4", "u8"]
MOVED = [*DTYPES, "?", "u2", "f2", "c8", "c16", "M8[s]", "V3", "S5", ">f4"]


def value(rank, shape, dtype="f8"):
    """The logical array of a rank: small whole numbers, so that sums are exact."""
    draw = np.random.default_rng(rank).integers(0, 20, shape)
    return np.asarray(draw).astype(dtype)


def laid_out(x, kind):
    """The same logical array in another memory order."""
    if kind == "F":
        return np.asfortranarray(x)
    if kind == "strided":
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if kind == "negative":
        return x[::-1].copy()[::-1]
    if kind == "transposed":
        return np.ascontiguousarray(x.T).T
    return x


KINDS = ["C", "F", "strided", "negative", "transposed"]


@pytest.fixture(params=["one piece", "many pieces"])
def axis(comm, bell, request, monkeypatch):
    """A communicator, with messages in one piece and in pieces of 40 bytes."""
    if request.param == "many pieces":
        monkeypatch.setattr(Communicator, "chunk_bytes", 40)
    return Communicator(comm, "tp", Counters(), bell=bell)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("shift", range(len(KINDS)))
@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 2), (0, 4), (3, 0)])
def test_any_memory_order_gives_the_logical_values(axis, shift, shape):
    """A22: each rank with another memory order, in every operation."""
    n, r = axis.size, axis.rank
    whole = [value(rank, shape) for rank in range(n)]

    def mine():
        return laid_out(whole[r].copy(), KINDS[(shift + 2 * r) % len(KINDS)])

    x = mine()
    assert axis.all_reduce(x) is x
    np.testing.assert_array_equal(x, sum(whole))
    np.testing.assert_array_equal(axis.all_reduce(mine(), "max"), np.max(whole, axis=0))
    np.testing.assert_array_equal(axis.all_gather(mine()), np.concatenate(whole))
    for root in range(n):
        x = mine()
        assert axis.broadcast(x, root) is x
        np.testing.assert_array_equal(x, whole[root])

    rows = slice(r * shape[0] // n, (r + 1) * shape[0] // n)
    np.testing.assert_array_equal(axis.reduce_scatter(mine()), sum(whole)[rows])
    parts = [whole[rank][rows] for rank in range(n)]
    np.testing.assert_array_equal(axis.all_to_all(mine()), np.concatenate(parts))

    to, source = (r + 1) % n, (r - 1) % n
    out = laid_out(np.zeros(shape), KINDS[(shift + r) % len(KINDS)])
    assert axis.send_recv(mine(), to, out, source) is out
    np.testing.assert_array_equal(out, whole[source])
    if r == 0:
        axis.send(mine(), to=1, tag=5)
    elif r == 1:
        out = laid_out(np.zeros(shape), KINDS[shift])
        np.testing.assert_array_equal(axis.recv(out, source=0, tag=5), whole[0])


@pytest.mark.mpi(3)
def test_uneven_rows_are_gathered_and_scattered(axis):
    n, r = axis.size, axis.rank
    counts = [4, 0, 7]
    whole = [value(rank, (counts[rank], 3), "f4") for rank in range(n)]
    np.testing.assert_array_equal(
        axis.all_gather(whole[r], counts), np.concatenate(whole)
    )
    full = [value(rank, (11, 3), "f4") for rank in range(n)]
    own = axis.reduce_scatter(full[r], counts)
    np.testing.assert_array_equal(own, np.split(sum(full), [4, 4])[r])


@pytest.mark.mpi(3)
def test_zero_dimensional_arrays(axis):
    """A22: 0-d arrays are reduced, moved, and gathered as one row each."""
    n, r = axis.size, axis.rank
    x = np.array(float(r + 1))
    assert axis.all_reduce(x) is x
    assert x.shape == () and x == 6
    np.testing.assert_array_equal(axis.all_gather(np.array(r)), range(n))
    assert axis.broadcast(np.array(r), root=2) == 2
    out = np.array(-1)
    assert axis.send_recv(np.array(r), (r + 1) % n, out, (r - 1) % n) == (r - 1) % n
    for refused in (axis.reduce_scatter, axis.all_to_all):
        with pytest.raises(ShapeError, match="3 equal parts"):
            refused(np.array(1.0))


@pytest.mark.mpi(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_added(axis, dtype):
    whole = [value(rank, (6, 2), dtype) for rank in range(3)]
    np.testing.assert_array_equal(axis.all_reduce(whole[axis.rank].copy()), sum(whole))
    own = axis.reduce_scatter(whole[axis.rank])
    np.testing.assert_array_equal(own, np.split(sum(whole), 3)[axis.rank])


@pytest.mark.mpi(3)
@pytest.mark.parametrize("dtype", MOVED)
def test_any_fixed_size_dtype_is_moved(axis, dtype):
    n, r = axis.size, axis.rank
    raw = np.dtype(dtype).kind == "V"
    numbers = [value(rank, (6, 4), "i8") for rank in range(n)]
    whole = [x.astype("S3").view(dtype) if raw else x.astype(dtype) for x in numbers]
    out = whole[r].copy()
    axis.send_recv(whole[r], (r + 1) % n, out, (r - 1) % n)
    assert out.tobytes() == whole[(r - 1) % n].tobytes()
    gathered = axis.all_gather(whole[r])
    assert gathered.tobytes() == b"".join(x.tobytes() for x in whole)
    assert axis.broadcast(whole[r].copy(), root=1).tobytes() == whole[1].tobytes()
    turned = axis.all_to_all(whole[r])
    assert turned.tobytes() == b"".join(np.split(x, n)[r].tobytes() for x in whole)
    assert gathered.dtype == turned.dtype == np.dtype(dtype)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("dtype", ["?", "c16", ">f2", ">f8", "M8[s]"])
def test_what_mpi_cannot_add_is_refused_by_name(comm, dtype):
    axis = Communicator(comm, "tp", Counters())
    x = np.zeros(4, dtype)
    with pytest.raises(CommError, match="MPI has no sum of"):
        axis.all_reduce(x)
    with pytest.raises(CommError, match=re.escape(str(x.dtype))):
        axis.reduce_scatter(x)


@pytest.mark.mpi(3)
def test_wrong_arguments_are_refused(comm):
    axis = Communicator(comm, "tp", Counters())
    with pytest.raises(CommError, match="'mean' is not one of sum, max"):
        axis.all_reduce(np.zeros(2), "mean")
    with pytest.raises(CommError, match="Python objects"):
        axis.broadcast(np.array([None, 1]))
    with pytest.raises(DeviceError, match=r"numpy\.float64"):
        axis.all_reduce(np.float64(1))
    with pytest.raises(ShapeError, match="4 rows"):
        axis.reduce_scatter(np.zeros((4, 2)))
    with pytest.raises(ShapeError, match="do not describe 4 rows"):
        axis.reduce_scatter(np.zeros((4, 2)), [1, 1, 1])
    with pytest.raises(ShapeError, match="do not describe 4 rows"):
        axis.reduce_scatter(np.zeros((4, 2)), [2, 2])
    with pytest.raises(ShapeError, match="do not describe 4 rows"):
        axis.all_gather(np.zeros((4, 2)), [3, 3, 3])
    with pytest.raises(ShapeError, match="4 rows"):
        axis.all_to_all(np.zeros((4, 2)))


@pytest.mark.mpi(3)
def test_a_message_of_another_size_is_an_error(comm):
    axis = Communicator(comm, "pp", Counters())
    if axis.rank == 0:
        axis.send(np.zeros(3), to=1)
        axis.send(np.zeros(5), to=1)
    elif axis.rank == 1:
        with pytest.raises(CommError, match=r"recv #1 on axis pp.*24 bytes came, 32"):
            axis.recv(np.zeros(4), source=0)
        with pytest.raises(CommError, match="recv #2 on axis pp"):
            axis.recv(np.zeros(4), source=0)


@pytest.mark.mpi(3)
def test_started_operations_give_the_same_as_blocking_ones(axis):
    n, r = axis.size, axis.rank
    x = value(r, (6, 5))
    reduced, total = x.T.copy().T, x.copy()
    counts = [1, 2, 3]
    got, y = np.empty_like(x), laid_out(x, "strided")
    handles = [
        axis.recv_start(got, (r - 1) % n, tag=3),
        axis.all_reduce_start(reduced),
        axis.all_gather_start(x),
        axis.reduce_scatter_start(x),
        axis.all_gather_start(x[: counts[r]], counts),
        axis.reduce_scatter_start(x, counts),
        axis.send_start(y, (r + 1) % n, tag=3),
    ]
    results = [handle.wait() for handle in handles]
    assert results[0] is got and results[1] is reduced and results[6] is y
    expected = [
        value((r - 1) % n, (6, 5)),
        axis.all_reduce(total),
        axis.all_gather(x),
        axis.reduce_scatter(x),
        axis.all_gather(x[: counts[r]], counts),
        axis.reduce_scatter(x, counts),
        x,
    ]
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, right)
    assert all(handle.test() for handle in handles)
    assert handles[1].wait() is reduced


@pytest.mark.mpi(4)
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_what_mpi_reads_lives_until_it_is_done(comm, bell, op):
    # In one piece: a copy that nobody else keeps
    axis = Communicator(comm, "dp", Counters(), bell=bell)
    shape = (8, 8, 1024)
    whole = [np.random.default_rng(rank).standard_normal(shape) for rank in range(4)]
    x = np.asfortranarray(whole[axis.rank])
    handle = getattr(axis, f"{op}_start")(x)
    junk = [np.full(shape, 7.0) for _ in range(8)]
    found, total = handle.wait(), sum(whole)
    expected = {
        "all_reduce": total,
        "reduce_scatter": total[2 * axis.rank : 2 * axis.rank + 2],
        "all_gather": np.concatenate(whole),
    }[op]
    assert np.allclose(found, expected, atol=1e-12) and len(junk) == 8


@pytest.mark.mpi(3)
def test_a_handle_can_be_tested_until_it_is_done(comm):
    axis = Communicator(comm, "pp", Counters())
    x = np.full(4, axis.rank)
    if axis.rank != 1:
        axis.barrier()
        if axis.rank == 0:
            axis.send(x, to=1)
    else:
        handle = axis.recv_start(x, source=0)
        assert not handle.test()
        axis.barrier()
        while not handle.test():
            pass
        np.testing.assert_array_equal(handle.wait(), np.zeros(4))


@pytest.mark.mpi(3)
def test_objects_travel_for_set_up(comm):
    axis = Communicator(comm, "tp", Counters())
    mine = {"rank": axis.rank}
    assert axis.all_gather_obj(mine) == [{"rank": i} for i in range(3)]
    assert axis.broadcast_obj(mine, root=1) == {"rank": 1}
    gathered = axis.gather_obj(mine)
    assert gathered == (None if axis.rank else [{"rank": i} for i in range(3)])
    assert axis.counters.since() == {}
