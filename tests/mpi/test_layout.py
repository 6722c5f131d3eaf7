"""Moves between layouts: values against NumPy, adjoints, and bytes."""

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpipar.comm import (
    Communicator,
    Counters,
    NullCommunicator,
    P,
    R,
    S,
    adjoint,
    reshard,
    shares,
    volume,
)
from mpipar.errors import ShapeError

CUTS = [S(0), S(1), S(2)]
MOVES = [
    *[(cut, R) for cut in CUTS],
    *[(P, cut) for cut in CUTS],
    *[(R, cut) for cut in CUTS],
    *[(a, b) for a in CUTS for b in CUTS],
    *[(P, R), (R, P), (R, R), (P, P)],
]
EVEN_ONLY = [(a, b) for a in CUTS for b in CUTS if a != b]
SHAPE = (12, 24, 12)  # 2, 3 and 4 ranks divide all of it, also twice where needed


def whole(shape, seed=0):
    return np.random.default_rng(seed).integers(-9, 9, shape).astype("f8")


def part(full, layout, comm, seed=1):
    """The own part of a logical array in a layout, memory order differing by rank."""
    n, r = comm.size, comm.rank
    if layout is R:
        return full.copy(order="CF"[r % 2])
    if layout is P:
        noise = [whole(full.shape, seed + i) for i in range(1, n)]
        summands = [full - sum(noise), *noise] if n > 1 else [full]
        return summands[r].copy()
    ends = np.cumsum(shares(full.shape[layout.dim], n))[:-1]
    return np.split(full, ends, axis=layout.dim)[r].copy(order="CF"[r % 2])


def logical(x, layout, comm):
    """The logical array, from all parts."""
    parts = comm.all_gather_obj(x)
    if layout is R:
        assert all(np.array_equal(p, parts[0]) for p in parts)
        return parts[0]
    if layout is P:
        return sum(parts)
    return np.concatenate(parts, axis=layout.dim)


def check_move(source, target, shape, comm):
    full = whole(shape)
    length = shape[source.dim] if isinstance(source, S) else None
    got = reshard(part(full, source, comm), source, target, comm, length)
    if target is P:
        np.testing.assert_array_equal(logical(got, P, comm), full)
    else:
        np.testing.assert_array_equal(got, part(full, target, comm))


def check_adjoint(source, target, comm):
    """<A x, y> = <x, A' y> in the sense of logical arrays, x and y independent."""
    x, y = whole(SHAPE, 3), whole(SHAPE, 4)
    forward = reshard(part(x, source, comm), source, target, comm)
    back_source, back_target = adjoint(source, target)
    back = reshard(part(y, back_source, comm), back_source, back_target, comm)
    left = np.vdot(logical(forward, target, comm), y)
    right = np.vdot(x, logical(back, back_target, comm))
    assert left == right == np.vdot(x, y)


def check_volume(source, target, comm):
    before = comm.counters.snapshot()
    reshard(part(whole(SHAPE), source, comm), source, target, comm)
    rows = comm.counters.since(before).get("tp", {}).values()
    predicted = volume(source, target, comm.size, whole(SHAPE).nbytes)
    assert sum(row["bytes"] for row in rows) == predicted
    assert len(rows) == (predicted > 0)


def every_move(comm):
    axis = Communicator(comm, "tp", Counters())
    for source, target in MOVES:
        check_move(source, target, SHAPE, axis)
        check_adjoint(source, target, axis)
        check_volume(source, target, axis)


def uneven_moves(comm):
    axis = Communicator(comm, "tp", Counters())
    for shape in [(5, 7, 3), (1, 10, 2), (3, 0, 5), (1, 1, 1), (4, 1, 9)]:
        for source, target in MOVES:
            if (source, target) not in EVEN_ONLY:
                check_move(source, target, shape, axis)


@pytest.mark.mpi(2)
def test_every_move_on_two_ranks(comm):
    every_move(comm)
    uneven_moves(comm)


@pytest.mark.mpi(3)
def test_every_move_on_three_ranks(comm):
    every_move(comm)
    uneven_moves(comm)


@pytest.mark.mpi(4)
def test_every_move_on_four_ranks(comm):
    every_move(comm)
    uneven_moves(comm)


@pytest.mark.mpi(3)
@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    move=st.sampled_from([move for move in MOVES if move not in EVEN_ONLY]),
    shape=st.tuples(*[st.integers(0, 8)] * 3),
)
def test_any_shape_survives_any_move(comm, move, shape):
    check_move(*move, shape, Communicator(comm, "tp", Counters()))


@pytest.mark.mpi(2)
def test_what_cannot_be_moved_is_refused_on_all_ranks(comm):
    axis = Communicator(comm, "tp", Counters())
    x = np.zeros((3, 4))
    with pytest.raises(ShapeError, match=r"no move from S\(dim=0\) to P"):
        reshard(x, S(0), P, axis)
    with pytest.raises(ShapeError, match=r"S\(dim=2\) does not exist"):
        reshard(x, R, S(2), axis)
    with pytest.raises(ShapeError, match="2 ranks do not divide dim 0 of size 3"):
        reshard(x, S(1), S(0), axis)
    with pytest.raises(ShapeError, match="should hold"):
        reshard(x, S(0), R, axis, length=9)
    with pytest.raises(ShapeError, match="2 ranks do not divide dim 0 of size 5"):
        own = np.zeros((3 - axis.rank, 4))
        reshard(own, S(0), S(1), axis, length=5)


@pytest.mark.mpi(2)
def test_slices_are_views_and_sums_are_in_place(comm):
    axis = Communicator(comm, "tp", Counters())
    x = np.ones((4, 6))
    assert np.shares_memory(reshard(x, R, S(1), axis), x)
    assert reshard(x, P, R, axis) is x
    assert x[0, 0] == 2


def test_dims_are_counted_from_the_front():
    with pytest.raises(ShapeError, match=r"S\(-1\)"):
        S(-1)


def test_adjoints_are_those_of_the_tensor_parallel_operators():
    assert adjoint(R, R) == (P, R)
    assert adjoint(P, R) == (R, R)
    assert adjoint(S(1), R) == (P, S(1))
    assert adjoint(P, S(1)) == (S(1), R)
    assert adjoint(R, S(0)) == (S(0), R)
    assert adjoint(S(0), S(1)) == (S(1), S(0))
    with pytest.raises(ShapeError, match="no move"):
        adjoint(S(0), P)


def test_volumes_are_those_of_the_table():
    n, size = 4, 1600
    assert volume(S(0), R, n, size) == volume(P, S(1), n, size) == 1200
    assert volume(P, R, n, size) == 2400
    assert volume(S(0), S(1), n, size) == 300
    for free in [(R, S(0)), (R, P), (R, R), (P, P), (S(1), S(1))]:
        assert volume(*free, n, size) == 0
    assert volume(S(0), R, 1, size) == volume(S(0), S(1), 1, size) == 0


def test_layouts_survive_pickling_and_one_rank_moves_nothing():
    for layout in (R, P, S(1)):
        assert pickle.loads(pickle.dumps(layout)) == layout
    assert pickle.loads(pickle.dumps(R)) is R
    with pytest.raises(ShapeError, match="no move"):
        reshard(np.zeros((2, 2)), S(0), P, NullCommunicator("tp"))
