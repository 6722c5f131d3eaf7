"""bf16 products in every layout: the loss and gradients of the serial bf16 model."""

import numpy as np
import pytest
from parity.build import (
    count_valid,
    gradients,
    layout_engine,
    make_batch,
    make_recipe,
    own_batches,
    region,
    scatter,
    serial_recipe,
)

from mpipar.engine import Engine
from mpipar.grid import serial_grid
from mpipar.ops import bf16_obstacle, make_ops

LAYOUTS = [
    pytest.param(ranks, words, marks=pytest.mark.mpi(ranks), id=f"{ranks} {words}")
    for ranks, words in (
        (2, ""),
        (2, "parallel.tensor=2"),
        (2, "parallel.tensor=2 parallel.sequence=true"),
        (4, "parallel.tensor=2 parallel.sequence=true train.micro_batch=4"),
    )
]


def serial_gradients(recipe):
    alone = serial_recipe(recipe)
    engine = Engine(alone, serial_grid(), make_ops("cpu", "bf16"))
    scatter(engine)
    engine.flat.refresh()
    batch = make_batch(recipe, 0)
    loss = engine.gradients([batch], count_valid(batch))
    return loss, gradients(engine)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(("ranks", "words"), LAYOUTS)
def test_layouts_agree_in_bf16(comm, ranks, words, family):
    if reason := bf16_obstacle("cpu"):
        pytest.skip(reason)
    changes = [f"model.family={family}", "train.precision=bf16", *words.split()]
    recipe = make_recipe(ranks, *changes)
    loss, expected = serial_gradients(recipe)
    with layout_engine(recipe, comm) as engine:
        engine.flat.refresh()
        batch = make_batch(recipe, 0)
        before = engine.grid.counters.snapshot()
        own = engine.gradients(own_batches(engine, batch), count_valid(batch))
        sent = engine.grid.counters.since(before)
        shared = engine.grid.dp.all_reduce(np.array([own]))[0]
        assert shared == pytest.approx(loss, rel=2e-3)
        whole = np.sqrt(sum((g.astype(float) ** 2).sum() for g in expected.values()))
        for p in engine.flat.parameters:
            error = np.linalg.norm(p.grad - expected[p.name][region(p)])
            assert error < 1e-2 * whole, p.name
        cost = engine.model.cost(recipe.train.micro_batch, recipe.model.context)
        for (axis, op), count in cost.calls.items():
            moved = recipe.accumulation * cost.moved[axis, op]
            got = sent[axis][op]
            if axis == "tp" and op != "all_reduce":
                assert got["calls"] == recipe.accumulation * count
                assert got["bytes"] == moved
