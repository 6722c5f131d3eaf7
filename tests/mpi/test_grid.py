"""The rank grid: who is where, and that nothing is left behind."""

import numpy as np
import pytest

from mpipar.comm import Communicator, NullCommunicator, mpi
from mpipar.errors import ConfigError
from mpipar.grid import Grid, serial_grid
from mpipar.grid.places import AXES, by_node, coords_of, peers_of

CUBE = {"tp": 2, "cp": 1, "dp": 2, "pp": 2}


def ones(axis):
    """Number of ranks that take part in a sum over the axis."""
    return int(axis.all_reduce(np.ones(1))[0])


def fellows(axis, grid):
    """World ranks of the members of an axis, by message."""
    return axis.all_gather(np.array([grid.rank])).tolist()


@pytest.mark.mpi(8)
def test_eight_ranks_make_a_cube(comm):
    with Grid(comm, CUBE) as grid:
        tp, dp, pp = (grid.coords[a] for a in ("tp", "dp", "pp"))
        assert grid.rank == tp + 2 * (dp + 2 * pp) and grid.coords["cp"] == 0
        assert fellows(grid.tp, grid) == [2 * (grid.rank // 2) + i for i in range(2)]
        assert fellows(grid.dp, grid) == [tp + 4 * pp, tp + 2 + 4 * pp]
        assert fellows(grid.pp, grid) == [tp + 2 * dp, tp + 2 * dp + 4]
        assert fellows(grid.grad, grid) == fellows(grid.dp, grid)
        assert fellows(grid.world, grid) == list(range(8))
        assert isinstance(grid.cp, NullCommunicator)
        assert (grid.tp.rank, grid.dp.rank, grid.pp.rank) == (tp, dp, pp)
        assert set(grid.counters.since()) == {"tp", "dp", "pp", "grad", "world"}
        assert grid.describe().startswith("tp 2 x dp 2 x pp 2 = 8 ranks on ")


@pytest.mark.mpi(4)
def test_the_order_of_axes_can_be_chosen_and_joined_axes_span_both(comm):
    sizes = {"tp": 1, "cp": 2, "dp": 2, "pp": 1}
    with Grid(comm, sizes, order=("dp", "pp", "cp", "tp")) as grid:
        cp, dp = divmod(grid.rank, 2)
        assert grid.coords == {"tp": 0, "cp": cp, "dp": dp, "pp": 0}
        assert fellows(grid.grad, grid) == [0, 1, 2, 3]
        assert isinstance(grid.tp, NullCommunicator) and ones(grid.cp) == 2
        assert "dp 2 x cp 2" in grid.describe()


@pytest.mark.mpi(4)
def test_sub_axes_are_blocks_of_neighbours_made_once(comm):
    with Grid(comm, {"tp": 4}) as grid:
        pair = grid.sub("tp", 2)
        assert fellows(pair, grid) == [2 * (grid.rank // 2), 2 * (grid.rank // 2) + 1]
        assert grid.sub("tp", 2) is pair and pair.name == "tp/2"
        assert ones(grid.sub("tp", 4)) == 4
        assert isinstance(grid.sub("tp", 1), NullCommunicator)
        assert isinstance(grid.sub("pp", 1), NullCommunicator)
        with pytest.raises(ConfigError, match="blocks of 3") as caught:
            grid.sub("tp", 3)
        assert caught.value.agreed


def refused(comm, sizes, text, **options):
    with pytest.raises(ConfigError, match=text) as caught:
        Grid(comm, sizes, **options)
    assert caught.value.agreed and caught.value.exit_code == 2


@pytest.mark.mpi(2)
def test_two_ranks_do_not_make_four(comm):
    """A32"""
    refused(comm, {"tp": 4}, "tp 4 x cp 1 x dp 1 x pp 1 = 4 ranks, but 2 were started")


@pytest.mark.mpi(6)
def test_six_ranks_do_not_make_four(comm):
    """A32"""
    refused(comm, {"tp": 2, "pp": 2}, "tp 2 x cp 1 x dp 1 x pp 2 = 4 ranks, but 6")


@pytest.mark.mpi(8)
def test_eight_ranks_do_not_make_four(comm):
    """A32"""
    refused(comm, {"dp": 1, "tp": 2, "pp": 2}, "= 4 ranks, but 8 were started")


@pytest.mark.mpi(2)
def test_all_wrong_sizes_are_named_at_once(comm):
    refused(comm, {"tp": 0, "ep": 2}, r"2 problems(.|\n)*ep is not.*\n.*tp = 0 must be")
    refused(comm, {"tp": 2}, "permutation", order=("tp", "dp"))


@pytest.mark.mpi(4)
def test_ranks_are_renumbered_node_by_node(comm, monkeypatch):
    """Ranks dealt out in turn over two nodes: tp stays inside a node, dp crosses."""
    monkeypatch.setattr(
        "mpipar.grid.grid._survey", lambda world, size: ([0, 1, 0, 1], False, False, 0)
    )
    with Grid(comm, {"tp": 2, "dp": 2}) as grid:
        started_as = grid.world.all_gather(np.array([comm.rank])).tolist()
        assert started_as == [0, 2, 1, 3]
        assert not grid.crosses_nodes("tp") and grid.crosses_nodes("dp")
        assert grid.describe() == "tp 2 x dp 2 = 4 ranks on 2 nodes"


@pytest.mark.mpi(4)
def test_the_node_size_can_be_pretended(comm, monkeypatch):
    with Grid(comm, {"tp": 4}, node_size=2) as grid:
        assert grid.crosses_nodes("tp") and not grid.crosses_nodes("dp")
    monkeypatch.setenv("MPIPAR_NODE_SIZE", "2")
    with Grid(comm, {"tp": 2, "dp": 2}) as grid:
        assert not grid.crosses_nodes("tp") and grid.crosses_nodes("dp")
        assert grid.crosses_nodes("grad")


@pytest.mark.mpi(2)
def test_closing_frees_every_communicator(comm, monkeypatch):
    freed = []
    free = Communicator.free
    monkeypatch.setattr(Communicator, "free", lambda c: (freed.append(c.name), free(c)))
    grid = Grid(comm, {"tp": 2}, timeout_s=60)
    grid.sub("tp", 2)
    made = [grid.world.mpi, grid.tp.mpi, grid.sub("tp", 2).mpi]
    grid.close()
    grid.close()
    assert sorted(freed) == ["tp", "tp/2", "world"]
    assert all(each == mpi.COMM_NULL for each in made)


@pytest.mark.mpi(2, timeout=90)
def test_grids_can_be_made_and_closed_without_end(comm):
    """MPICH has some 2000 communicators, and a grid makes four of them."""
    for _ in range(700):
        with Grid(comm, {"dp": 2}) as grid:
            grid.sub("dp", 2)


@pytest.mark.mpi(2)
def test_an_error_of_one_rank_does_not_wait_for_the_others_to_free(comm):
    def fail(agreed):
        error = RuntimeError("on one rank")
        error.agreed = agreed
        with pytest.raises(RuntimeError, match="on one rank"), grid:
            raise error

    grid = Grid(comm, {"tp": 2})
    fail(agreed=False)
    assert grid.world.mpi != mpi.COMM_NULL
    fail(agreed=True)
    assert grid.world.mpi == mpi.COMM_NULL


@pytest.mark.mpi(2)
def test_a_grid_of_one_rank_has_null_communicators_only(comm):
    with Grid(mpi.COMM_SELF, {}, timeout_s=60) as grid, serial_grid() as serial:
        for same in (grid, serial):
            for axis in (*AXES, "grad", "world"):
                assert isinstance(getattr(same, axis), NullCommunicator)
            assert (same.rank, same.size) == (0, 1)
            assert isinstance(same.sub("tp", 1), NullCommunicator)
            assert not same.crosses_nodes("tp")
            assert same.describe().startswith("1 rank")


def test_places_cover_the_world_disjointly():
    sizes = {"tp": 2, "cp": 3, "dp": 2, "pp": 2}
    for order in (AXES, ("pp", "tp", "dp", "cp")):
        for axes in (["tp"], ["cp"], ["dp", "cp"], AXES):
            groups = {tuple(peers_of(r, axes, sizes, order)) for r in range(24)}
            assert sorted(r for group in groups for r in group) == list(range(24))
        assert coords_of(0, sizes, order) == dict.fromkeys(order, 0)
    assert coords_of(1 + 2 * (2 + 3 * (0 + 2 * 1)), sizes, AXES) == {
        "tp": 1, "cp": 2, "dp": 0, "pp": 1,
    }  # fmt: skip


def test_nodes_are_filled_one_after_the_other():
    assert by_node([7, 3, 7, 3, 5]) == [0, 2, 1, 3, 4]
    assert by_node(["a", "a", "b"]) == [0, 1, 2]
