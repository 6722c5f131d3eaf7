"""Values that are rounded by draws: those of their masters in every layout."""

import math

import numpy as np
import pytest
from parity.build import (
    layout_engine,
    make_batch,
    make_recipe,
    region,
    save_engine,
    take_step,
)

from mpipar.checkpoint import read_manifest
from mpipar.ops import Ops
from mpipar.ops.half import narrow_stochastic
from mpipar.ops.philox import stream_key, words_at
from mpipar.zero.joint import JointState

EXPERTS = "model.family=llama experts.count=4 experts.bias_rate=0.1 train.micro_batch=3"
LAYOUTS = [
    "parallel.tensor=2",
    "parallel.tensor=2 parallel.sequence=true model.family=llama model.kv_heads=1",
    "parallel.zero=0",
    "parallel.zero=1 parallel.unit=2",
    "parallel.zero=3 train.micro_batch=3",
    "parallel.pipeline=2 train.micro_batch=6",
    f"parallel.expert=2 parallel.zero=2 {EXPERTS}",
]


def stochastic(words, half="bf16"):
    words = [f"train.precision={half}", "optimizer.rounding=stochastic", *words.split()]
    return make_recipe(2, *words, "train.loss_scale=4096")


def parts_of(engine):
    state = engine.state
    return state.parts if isinstance(state, JointState) else [state]


def values_of(engine):
    """The 16-bit values of this rank's boxes, by name."""
    found = {}
    for state in parts_of(engine):
        for index, unit in enumerate(state.flat.units):
            state.values.need([index])
            found |= {p.name: p.data.copy() for p in unit.parameters}
            state.values.done(index)
    return found


def expected(engine):
    """Masters of this rank's boxes, rounded by the words of their global indices."""
    found = {}
    ops = Ops(dtype="float32", half=engine.recipe.train.precision)
    for parameters in engine.state.whole_units("values"):
        for p in parameters:
            index = (
                np.arange(math.prod(p.shape)).reshape(p.shape)[region(p)].reshape(-1)
            )
            key = stream_key(engine.recipe.train.seed, f"{p.name}.rounding")
            words = words_at(index, engine.optimizer.count, key)
            out = ops.empty_operand(index.shape)
            narrow_stochastic(p.data.reshape(-1), words, out)
            found[p.name] = out.reshape(p.local_shape)
    return found


def assert_same(found, right):
    assert found.keys() == right.keys()
    for name, bits in right.items():
        assert np.array_equal(found[name], bits), name


@pytest.mark.parametrize("words", LAYOUTS)
@pytest.mark.mpi(2)
def test_values_are_those_of_their_masters(comm, tmp_path, words):
    """Also when one has looked at masters, and in a run that goes on."""
    recipe, run = stochastic(words), comm.bcast(tmp_path)
    with layout_engine(recipe, comm) as engine:
        assert_same(values_of(engine), expected(engine))
        for step in range(2):
            assert take_step(engine, make_batch(recipe, step)).updated
        before = values_of(engine)
        assert_same(before, expected(engine))
        assert_same(values_of(engine), before)
        folder = save_engine(engine, run)
        take_step(engine, make_batch(recipe, 2))
        after = values_of(engine)
    with layout_engine(recipe, comm) as engine:
        engine.restore(folder, read_manifest(folder))
        assert_same(values_of(engine), before)
        take_step(engine, make_batch(recipe, 2))
        assert_same(values_of(engine), after)


@pytest.mark.mpi(2)
def test_a_skipped_step_has_no_draws(comm):
    recipe = stochastic("parallel.zero=1", "fp16")
    with layout_engine(recipe, comm) as engine:
        take_step(engine, make_batch(recipe, 0))
        before = values_of(engine)
        engine.loss_scale.value = 1e30
        assert not take_step(engine, make_batch(recipe, 1)).updated
        assert_same(values_of(engine), before)
        assert_same(before, expected(engine))
