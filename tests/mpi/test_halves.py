"""16-bit floats between ranks: bits travel, sums are float32 and rounded once."""

import random

import numpy as np
import pytest
from numeric import from_half, to_half

from mpipar.comm import Communicator, Counters, shared
from mpipar.errors import CommError, ShapeError

KINDS = {"bf16": "u2", "fp16": "f2"}


@pytest.fixture(params=["messages", "shared memory"])
def axis(comm, bell, monkeypatch, request):
    monkeypatch.setattr(shared, "SHARED_BYTES", 1)
    monkeypatch.setattr(shared, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr("mpipar.ops.half._BLOCK", 100)
    axis = Communicator(comm.Dup(), "dp", Counters(), bell=bell)
    axis.in_memory = request.param == "shared memory"
    yield axis
    axis.free()


def stored(axis, numbers, kind):
    """The numbers (n,) in 16 bits, where the axis is to find them."""
    bits = pack(numbers, kind)
    if not axis.in_memory:
        return bits
    x = axis.shared_zeros(bits.size, bits.dtype)
    x[...] = bits
    return x


def pack(numbers, kind):
    return to_half(np.asarray(numbers, np.float32), kind)


def drawn(rank, size, kind):
    numbers = np.random.default_rng(rank).standard_normal(size)
    return from_half(pack(numbers, kind))


def total(ranks, size, kind):
    """The sum in float32 in rank order."""
    result = drawn(0, size, kind)
    for rank in range(1, ranks):
        result += drawn(rank, size, kind)
    return result


@pytest.mark.mpi(2)
def test_ones_are_two(axis):
    """A19: as integers, the bits of 1.0 + 1.0 are those of 1.7e38."""
    for kind in KINDS:
        x = stored(axis, np.ones(7), kind)
        assert axis.all_reduce(x) is x
        assert np.array_equal(from_half(x), np.full(7, 2.0))


@pytest.mark.mpi(8)
def test_small_summands_are_not_lost(axis):
    """A19: 256 and seven times 1; in bf16 each addition by itself would be lost."""
    first = 256.0 if axis.rank == 0 else 1.0
    for kind, once in (("bf16", 264.0), ("fp16", 263.0)):
        x = stored(axis, np.full(16, first), kind)
        sums = np.empty(2, np.float32)
        assert axis.reduce_scatter(x, out=sums) is sums
        assert np.array_equal(sums, np.full(2, 263.0))
        assert np.array_equal(from_half(axis.reduce_scatter(x)), np.full(2, once))
        assert np.array_equal(from_half(axis.all_reduce(x)), np.full(16, once))


def check_sums(axis, kind):
    for size in (0, 1, axis.size - 1, 1000, 4099):
        right = total(axis.size, size, kind) if size else np.zeros(0, np.float32)
        x = stored(axis, drawn(axis.rank, size, kind), kind)
        before = axis.counters.snapshot()
        axis.all_reduce(x)
        assert np.array_equal(x, pack(right, kind))
        cut = [size // axis.size + (r < size % axis.size) for r in range(axis.size)]
        sent = 2 * size - cut[axis.rank] - cut[(axis.rank + 1) % axis.size]
        moved = axis.counters.since(before)["dp"]["all_reduce"]
        assert (moved["calls"], moved["bytes"]) == (1, 2 * sent)
    counts = [3, 0, 9, 4, 1, 1, 2, 5][: axis.size]
    size, begin = 300 * sum(counts), sum(counts[: axis.rank])
    right = total(axis.size, size, kind).reshape(-1, 300)
    x = stored(axis, drawn(axis.rank, size, kind), kind).reshape(-1, 300)
    own = right[begin : begin + counts[axis.rank]]
    assert np.array_equal(axis.reduce_scatter(x, counts), pack(own, kind))
    wide = np.empty(own.shape, np.float32)
    assert np.array_equal(axis.reduce_scatter(x, counts, wide), own)
    into = x[begin : begin + counts[axis.rank]]
    assert axis.reduce_scatter(x, counts, into) is into
    assert np.array_equal(into, pack(own, kind))


@pytest.mark.mpi(2)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_on_two_ranks(axis, kind):
    check_sums(axis, kind)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_on_three_ranks(axis, kind):
    check_sums(axis, kind)


@pytest.mark.mpi(8)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_on_eight_ranks(axis, kind):
    check_sums(axis, kind)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("kind", KINDS)
def test_infinity_and_nan_arrive(axis, kind):
    numbers = [np.inf, np.inf if axis.rank else -np.inf, np.nan if axis.rank else 1, 1]
    x = axis.all_reduce(stored(axis, numbers, kind))
    assert np.array_equal(from_half(x), [np.inf, np.nan, np.nan, 3], equal_nan=True)


@pytest.mark.mpi(2)
def test_a_sum_beyond_fp16_is_infinite(axis):
    x = stored(axis, np.full(6, 40000.0), "fp16")
    sums = np.empty(3, np.float32)
    assert np.array_equal(axis.reduce_scatter(x, out=sums), np.full(3, 80000.0))
    assert np.isinf(axis.all_reduce(x)).all()


@pytest.mark.mpi(3)
def test_many_sums_are_under_way_and_turn_in_any_order(comm, bell):
    """The second halves begin in another order on each rank."""
    axis = Communicator(comm.Dup(), "dp", Counters(), bell=bell)
    arrays = [pack(drawn(axis.rank, 500 + n, "bf16"), "bf16") for n in range(20)]
    handles = [axis.all_reduce_start(x) for x in arrays]
    order = handles[:]
    random.Random(axis.rank).shuffle(order)
    while not all([handle.test() for handle in order]):
        pass
    for handle in handles:
        handle.wait()
    for n, x in enumerate(arrays):
        assert np.array_equal(x, pack(total(3, 500 + n, "bf16"), "bf16"))
    axis.free()


@pytest.mark.mpi(3)
@pytest.mark.parametrize("limit", [1, 100, 4096])
def test_long_arrays_go_in_pieces(comm, monkeypatch, limit):
    monkeypatch.setattr(Communicator, "chunk_bytes", limit)
    axis = Communicator(comm.Dup(), "dp", Counters())
    x = pack(drawn(axis.rank, 600, "fp16"), "fp16")
    right = pack(total(3, 600, "fp16"), "fp16")
    own = axis.reduce_scatter(x, [0, 590, 10])
    assert np.array_equal(own, np.split(right, [0, 590])[axis.rank])
    assert np.array_equal(axis.all_reduce(x), right)
    axis.free()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("limit", range(4, 22, 2))
def test_ranks_with_unequal_shares_choose_the_same_way(comm, monkeypatch, limit):
    """Near the limit one rank may get less than it and the other one more."""
    monkeypatch.setattr(Communicator, "chunk_bytes", limit)
    axis = Communicator(comm.Dup(), "dp", Counters())
    x = pack(drawn(axis.rank, 5, "fp16"), "fp16")
    right = pack(total(2, 5, "fp16"), "fp16")
    own = axis.reduce_scatter(x, [1, 4])
    assert np.array_equal(own, np.split(right, [1])[axis.rank])
    assert np.array_equal(axis.all_reduce(x), right)
    axis.free()


@pytest.mark.mpi(2)
def test_what_has_no_meaning_is_refused(axis):
    with pytest.raises(CommError, match="MPI has no max of uint16"):
        axis.all_reduce(np.zeros(4, "u2"), "max")
    for wrong in (np.empty(2, "f8"), np.empty(2, "f2"), np.empty(3, "f4")):
        with pytest.raises(ShapeError, match="out must be a contiguous"):
            axis.reduce_scatter(np.zeros(4, "u2"), out=wrong)
