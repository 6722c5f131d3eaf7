"""The state of all ranks is in the memory of any others that hold it between them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved import facts_of

from mpipar.checkpoint import Copies, Fragment, load, read_manifest, save_copies
from mpipar.comm import Communicator, Counters
from mpipar.ops import make_ops

OPS = make_ops("cpu", "fp64")
KINDS = ("weights", "m", "v")


def fragment_of(rank: int, step: int) -> Fragment:
    """rank + 1 elements of an array of its own, other numbers at every step."""
    size = rank + 1
    values = np.arange(size) + 100.0 * step + 10 * rank
    arrays = {kind: values + 0.1 * n for n, kind in enumerate(KINDS)}
    return Fragment(f"x{rank}", (size,), ((0, size),), 0, size, arrays)


def check(folder: Path, ranks: int, step: int) -> None:
    found = [fragment_of(rank, 0) for rank in range(ranks)]
    load(folder, read_manifest(folder), found, OPS)
    for rank, fragment in enumerate(found):
        for kind, x in fragment_of(rank, step).arrays.items():
            assert np.array_equal(fragment.arrays[kind], x)


@pytest.mark.mpi(4)
def test_what_a_lost_rank_had_is_saved_by_its_neighbour(
    comm: Any, tmp_path: Path
) -> None:
    run = comm.bcast(tmp_path)
    world = Communicator(comm, "world", Counters())
    copies = Copies(world, OPS, [fragment_of(world.rank, 0)], KINDS)
    sizes = 8 * 3 * np.arange(1, 5)
    neighbour = sizes[(world.rank - 1) % 4]
    assert copies.nbytes == copies.predicted == 2 * (sizes[world.rank] + neighbour)
    for step in (2, 4, 6):
        copies.keep(facts_of(step), [fragment_of(world.rank, step)])
    # Rank 1 is gone; rank 2, which has its copies, has not got the newest one.
    if world.rank == 1:
        copies = None
    if world.rank == 2:
        copies._facts = {n: f for n, f in copies._facts.items() if f != facts_of(6)}
    folder = save_copies(copies, world, run)
    assert folder.name == "step_00000004"
    check(folder, 4, 4)
    assert save_copies(copies, world, run) is None, "it is on disk"
    world.barrier()
    # Two neighbours are gone
    gone = world.rank in (0, 3)
    assert save_copies(None if gone else copies, world, run / "other") is None
