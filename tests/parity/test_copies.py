"""Weights that several ranks hold are compared: a single bit that differs is told."""

import numpy as np
import pytest
from parity.build import layout_engine, make_batch, make_recipe, take_step, write_tokens

from mpipar.checkpoint.folder import checkpoints
from mpipar.engine import Engine, check_copies
from mpipar.errors import CorruptionError
from mpipar.train.run import run_training

# (ranks, words, rank whose bit is turned, a weight that is there, an axis that sees it)
CASES = [
    (2, "", 1, "blocks.1.mlp.up.weight", "grad"),
    (3, "parallel.zero=1", 2, "embedding.token.weight", "grad"),
    (3, "parallel.zero=2 parallel.context=3", 0, "head.norm.gain", "grad"),
    (2, "parallel.tensor=2", 0, "blocks.0.norm1.gain", "tp"),
    (2, "parallel.tensor=2 parallel.sequence=true", 1, "blocks.1.mlp.down.bias", "tp"),
    (4, "parallel.pipeline=2", 3, "blocks.1.norm2.bias", "grad"),
    (4, "experts.count=4 parallel.expert=2", 2, "blocks.0.mlp.experts.1.up.weight",
     "edp"),
    (4, "experts.count=4 parallel.expert=4", 1, "blocks.0.mlp.router.weight", "grad"),
]  # fmt: skip


def cases():
    for ranks, words, rank, name, axis in CASES:
        mark = pytest.mark.mpi(ranks)
        yield pytest.param(words, rank, name, axis, marks=mark, id=f"{ranks} {words}")


def turn_a_bit(engine, name):
    (p,) = (p for p in engine.state.parameters if p.name == name)
    number = p.data.reshape(-1)[:1]
    number.view(np.uint64)[...] ^= 1


@pytest.mark.parametrize(("words", "rank", "name", "axis"), list(cases()))
def test_a_bit_that_differs_is_told_on_all_ranks(comm, words, rank, name, axis):
    recipe = make_recipe(comm.size, *words.split())
    with layout_engine(recipe, comm) as engine:
        take_step(engine, make_batch(recipe, 0))
        check_copies(engine)
        if engine.grid.world.rank == rank:
            turn_a_bit(engine, name)
        with pytest.raises(CorruptionError, match="after step 1 ") as caught:
            check_copies(engine)
        lines = str(caught.value).split("\n")[1:]
        assert caught.value.agreed and all(f"(axis {axis})" in line for line in lines)
        # Of two nobody knows which is right.
        peers = getattr(engine.grid, axis).all_gather_obj(engine.grid.world.rank)
        told = [int(line.split()[2]) for line in lines]
        if rank in peers:
            assert told == (peers if len(peers) == 2 else [rank])


@pytest.mark.mpi(4)
def test_groups_that_share_everything_are_compared_part_by_part(comm):
    recipe = make_recipe(4, "parallel.zero=3", "parallel.zero_shard=2")
    with layout_engine(recipe, comm) as engine:
        take_step(engine, make_batch(recipe, 0))
        check_copies(engine)
        if engine.grid.world.rank == 2:
            engine.state.values.own(1).view(np.uint64)[5] ^= 1
        with pytest.raises(CorruptionError, match="blocks.0"):
            check_copies(engine)


@pytest.mark.mpi(2)
def test_a_run_stops_before_it_saves_them(comm, tmp_path, monkeypatch):
    step, folder = Engine.step, comm.bcast(tmp_path)
    tokens = write_tokens(comm, folder)

    def turn(self, *words, **options):
        result = step(self, *words, **options)
        if self.number == 4 and comm.rank == 1:
            turn_a_bit(self, "blocks.0.mlp.up.weight")
        return result

    monkeypatch.setattr(Engine, "step", turn)
    words = "train.check_every=1", "checkpoint.every=2", "checkpoint.async=false"
    recipe = make_recipe(2, f"data.source={tokens}", *words)
    with pytest.raises(CorruptionError, match="after step 4 "):
        run_training(recipe, comm, out=folder / "run")
    names = [path.name for path in checkpoints(folder / "run")]
    assert names == ["step_00000002"]
