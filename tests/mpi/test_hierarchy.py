"""Sums and gathers over nodes are those over ranks, with less between nodes."""

import numpy as np
import pytest

from mpipar.comm import Communicator, Counters
from mpipar.comm import hierarchy as room
from mpipar.comm.hierarchy import Hierarchy, ranks_per_node
from mpipar.grid import Grid
from mpipar.ops.half import BF16, narrow

SIZES = {"even": [5] * 6, "uneven": [3, 0, 7, 1, 4, 2], "one": [0, 0, 0, 9, 0, 0]}


@pytest.mark.parametrize(
    ("nodes", "each"),
    [
        ([0, 0, 1, 1], 2), ([3, 3, 3, 1, 1, 1], 3), ([0, 0, 0, 0], 0),
        ([0, 1, 2], 0), ([0, 0, 0, 1], 0), ([0, 0, 1], 0), ([0, 1, 0, 1], 0), ([0], 0),
        ([0, 1, 1, 0], 0), ([0, 0, 1, 1, 1, 2], 0),
    ],
)  # fmt: skip
def test_equally_many_ranks_of_several_nodes(nodes, each):
    assert ranks_per_node(nodes) == each


@pytest.fixture(params=["one piece", "many pieces"])
def axes(comm, request, monkeypatch):
    """The same ranks on nodes of two, and on nodes of nobody's concern."""
    monkeypatch.setattr(Communicator, "hierarchy_bytes", 0)
    if request.param == "many pieces":
        monkeypatch.setattr(Communicator, "chunk_bytes", 12)
    nodes = [rank // 2 for rank in range(comm.size)]
    yield tuple(
        Communicator(comm, "dp", Counters(), nodes=some) for some in (nodes, None)
    )


def drawn(axis, size, dtype="f8"):
    """Whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(axis.rank)
    return rng.integers(-50, 50, size).astype(dtype)


def counted(axis):
    """Calls and bytes of each operation."""
    return {key: tally[:2] for key, tally in axis.counters.snapshot().items()}


@pytest.mark.mpi(6)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u1"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_same_comes_out(axes, sizes, dtype):
    over, flat = axes
    counts = SIZES[sizes]
    x = drawn(over, (sum(counts), 3), dtype)
    scattered = over.reduce_scatter(x.copy(), counts)
    assert np.array_equal(scattered, flat.reduce_scatter(x.copy(), counts))
    gathered = over.all_gather(scattered, counts)
    assert np.array_equal(gathered, flat.all_gather(scattered, counts))
    assert counted(over) == counted(flat)
    alike = x[:2]
    assert np.array_equal(over.all_gather(alike), flat.all_gather(alike))
    # In place, as gradients and weights are
    start = sum(counts[: over.rank])
    rows = slice(start, start + counts[over.rank])
    over.reduce_scatter(x, counts, out=x[rows])
    assert np.array_equal(x[rows], scattered)
    over.all_gather(x[rows], counts, out=x)
    assert np.array_equal(x, gathered)


@pytest.mark.mpi(6)
def test_sums_of_16_bits_are_rounded_once(comm, monkeypatch):
    """On nodes of three; nodes of two would gain nothing."""
    monkeypatch.setattr(Communicator, "hierarchy_bytes", 0)
    over = Communicator(comm, "dp", Counters(), nodes=[0, 0, 0, 1, 1, 1])
    # bf16 has 8 bits: 257 lies between two numbers of it, and would become 256.
    values = [256.0, 1.0, 0.0, 0.5, 0.5, 0.0]

    def halves(value, size):
        return narrow(np.full(size, value, np.float32), np.empty(size, BF16))

    x = halves(values[over.rank], 11)
    assert np.array_equal(over.all_reduce(x.copy()), halves(258, 11))
    counts = [2, 3, 1, 0, 3, 2]
    own = over.reduce_scatter(x.copy(), counts)
    assert np.array_equal(own, halves(258, counts[over.rank]))
    wide = np.empty(counts[over.rank], np.float32)
    over.reduce_scatter(x.copy(), counts, out=wide)
    assert np.all(wide == 258)
    assert np.array_equal(over.all_gather(own, counts), halves(258, 11))
    assert over._hierarchy is not None


@pytest.mark.mpi(4)
def test_operations_may_be_looked_at_in_any_order(axes):
    """They are waited for in the same one, as those of shared memory are."""
    over, _ = axes
    exact, handles = [], []
    for number in range(6):
        x = np.full(40, float(number + over.rank))
        exact.append(4 * number + 6)
        handles.append(over.reduce_scatter_start(x))
    for number in np.random.default_rng(over.rank).permutation(6):
        for _ in range(3):
            handles[number].test()
    for handle, value in zip(handles, exact, strict=True):
        assert np.all(handle.wait() == value)


@pytest.mark.mpi(6)
def test_a_node_sends_others_as_little_as_can_be(comm, monkeypatch):
    """(N-1)/N of the array for each step, which is once over all ranks of a node."""
    length, nodes = 6 * 10, 3
    sent = []

    def count(self, blocks, to, tag):
        if to // 2 != comm.rank // 2:
            sent.append(sum(block.nbytes for block in blocks))
        return send(self, blocks, to, tag)

    send = Hierarchy._send
    monkeypatch.setattr(Hierarchy, "_send", count)
    levels = Hierarchy(comm, 2, 1 << 20)

    def of_a_node(steps, dtype="f8"):
        sent.clear()
        for requests in steps:
            room.mpi.Request.Waitall(requests)
        return comm.allreduce(sum(sent)) / nodes / np.dtype(dtype).itemsize

    x, own = np.zeros(length), np.zeros(10)
    once = length * (nodes - 1) / nodes
    assert of_a_node(levels.reduce_scatter(x, [10] * 6, own)) == once
    bytes_of = [part.view(np.uint8) for part in (own, x)]
    assert of_a_node(levels.all_gather(*bytes_of, [80] * 6)) == once
    assert of_a_node(levels.all_reduce(x)) == 2 * once
    # Sums of 16-bit floats go between nodes in float32.
    half = np.zeros(length, BF16)
    assert of_a_node(levels.all_reduce(half), BF16) == 3 * once
    levels.free()


@pytest.mark.mpi(4)
def test_the_grid_knows_the_nodes(comm, monkeypatch):
    monkeypatch.setattr(Communicator, "hierarchy_bytes", 0)
    made = []
    start = Hierarchy.__init__

    def noted(self, inner, each, limit):
        made.append(each)
        start(self, inner, each, limit)

    monkeypatch.setattr(Hierarchy, "__init__", noted)
    for hierarchical, found in ((True, [2]), (False, [])):
        made.clear()
        options = {"node_size": 2, "hierarchical": hierarchical}
        with Grid(comm, {"dp": 4}, **options) as grid:
            assert len(grid.dp.all_gather(np.ones(4))) == 16
        assert made == found
    # Three ranks here and one there: the plain way
    made.clear()
    with Grid(comm, {"dp": 4}, node_size=3) as grid:
        assert len(grid.dp.all_gather(np.ones(4))) == 16
    assert made == []
