"""The numbers are the same where ranks are on several nodes, which sum in turn.

Nodes are pretended: what is tried is the way over them, not a network.
"""

import pytest
from parity.build import compare, make_recipe

from mpipar.comm import Communicator
from mpipar.comm.hierarchy import Hierarchy


@pytest.fixture
def in_levels(monkeypatch):
    """All sums and gathers go over nodes of so many ranks; those that did are noted."""
    found = []

    def note(name):
        step = getattr(Hierarchy, name)

        def noted(self, *args):
            found.append(name)
            return step(self, *args)

        monkeypatch.setattr(Hierarchy, name, noted)

    def set_up(node_size):
        monkeypatch.setenv("MPIPAR_NODE_SIZE", str(node_size))
        return found

    monkeypatch.setattr(Communicator, "hierarchy_bytes", 0)
    for name in ("reduce_scatter", "all_gather"):
        note(name)
    return set_up


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.mpi(4)
def test_data_parallel_ranks_of_two_nodes(comm, in_levels, zero):
    found = in_levels(2)
    recipe = make_recipe(4, "parallel.data=4", f"parallel.zero={zero}")
    assert compare(recipe, comm, steps=2).above(1e-10) == {}
    assert set(found) == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.tensor=2", "parallel.zero=3"),
        ("parallel.context=2", "parallel.zero=2", "parallel.context_method=ring"),
        (
            "parallel.pipeline=2",
            "parallel.zero=1",
            "train.micro_batch=1",
            'parallel.order=["pp", "tp", "cp", "dp"]',
        ),
        ("parallel.zero_shard=8", "parallel.zero=2", "train.micro_batch=1"),
    ],  # fmt: skip
    ids=lambda words: words[0].partition("=")[0],
)
@pytest.mark.mpi(8)
def test_axes_that_cross_nodes_in_part(comm, in_levels, words):
    """Four ranks a node, of which some share the axis that is summed over."""
    found = in_levels(4)
    recipe = make_recipe(8, *words)
    assert compare(recipe, comm, steps=2).above(1e-10) == {}
    assert found


@pytest.mark.mpi(5)
def test_nodes_with_unequal_numbers_of_ranks_take_the_plain_way(comm, in_levels):
    found = in_levels(3)
    recipe = make_recipe(5, "parallel.data=5", "train.global_batch=10")
    assert compare(recipe, comm, steps=2).above(1e-10) == {}
    assert not found
