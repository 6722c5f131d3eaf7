"""Mixed precision in every layout: near the serial model, stages equal to the bit."""

import numpy as np
import pytest
from numeric import from_half
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
    take_step,
)
from parity.test_counts import count_step, ring

from mpipar.engine import Engine
from mpipar.grid import serial_grid
from mpipar.ops import make_ops

HALVES = ["bf16", "fp16"]
LAYOUTS = [
    pytest.param(ranks, words, marks=pytest.mark.mpi(ranks), id=f"{ranks} {words}")
    for ranks, words in (
        (2, ""),
        (2, "parallel.tensor=2"),
        (2, "parallel.tensor=2 parallel.sequence=true"),
        (2, "parallel.zero=3 train.micro_batch=3"),
        (3, "parallel.zero=2 train.recompute=full"),
        (4, "parallel.tensor=2 parallel.sequence=true train.micro_batch=4"),
        (4, "parallel.zero=3 parallel.zero_shard=2 train.recompute=selective"),
        (4, "parallel.tensor=2 parallel.sequence=true parallel.zero=1"),
        (8, "parallel.tensor=2 parallel.zero=3 model.tied=false"),
    )
]


def mixed(half, *words):
    return [f"train.precision={half}", "train.loss_scale=4096", *words]


def serial_gradients(recipe):
    alone = serial_recipe(recipe)
    engine = Engine(alone, serial_grid(), make_ops("cpu", recipe.train.precision))
    scatter(engine)
    batch = make_batch(recipe, 0)
    loss = engine.gradients([batch], count_valid(batch))
    return loss, {name: from_half(g) for name, g in gradients(engine).items()}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(("ranks", "words"), LAYOUTS)
def test_layouts_agree_in_16_bits(comm, ranks, words, family, half):
    recipe = make_recipe(ranks, *mixed(half, f"model.family={family}", *words.split()))
    loss, expected = serial_gradients(recipe)
    with layout_engine(recipe, comm) as engine:
        batch = make_batch(recipe, 0)
        before = engine.grid.counters.snapshot()
        own = engine.gradients(own_batches(engine, batch), count_valid(batch))
        sent = engine.grid.counters.since(before)
        shared = engine.grid.dp.all_reduce(np.array([own]))[0]
        assert shared == pytest.approx(loss, rel=2e-3)
        whole = np.sqrt(sum((g.astype(float) ** 2).sum() for g in expected.values()))
        for parameters in engine.state.whole_units("gradients"):
            for p in parameters:
                assert p.grad.dtype == np.float32
                error = np.linalg.norm(p.grad - expected[p.name][region(p)])
                assert error < 1e-2 * whole, p.name
        cost = engine.model.cost(recipe.train.micro_batch, recipe.model.context)
        again = recipe.train.recompute == "full"
        for (axis, op), count in cost.calls.items():
            moved = recipe.accumulation * cost.moved[axis, op]
            got = sent[axis][op]
            if axis == "tp" and op != "all_reduce" and not again:
                assert got["calls"] == recipe.accumulation * count
                assert got["bytes"] == moved


# ZeRO stages


def trained(recipe, comm):
    """Masters and rounded weights after five steps, of this rank."""
    with layout_engine(recipe, comm) as engine:
        for step in range(5):
            assert take_step(engine, make_batch(recipe, step)).updated
        rounded = []
        for index in range(len(engine.flat.units)):
            engine.state.values.need([index])
            unit = engine.flat.units[index]
            rounded += [p.data.copy() for p in unit.parameters]
            engine.state.values.done(index)
        masters = {}
        for parameters in engine.state.whole_units("values"):
            masters |= {p.name: p.data.copy() for p in parameters}
    return masters, rounded


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.mpi(n)) for n in (2, 3, 4, 8)]
)
def test_stages_train_the_same_bits(comm, n, half):
    """Summed in float32 in rank order and rounded once, whoever sums."""
    words = mixed(half, "train.clip=0", "model.width=30", "model.heads=3")
    results = []
    for stage in range(4):
        recipe = make_recipe(n, *words, f"parallel.zero={stage}")
        results.append(trained(recipe, comm))
    for masters, rounded in results[1:]:
        for name, exact in results[0][0].items():
            assert np.array_equal(masters[name], exact), name
        for ours, exact in zip(rounded, results[0][1], strict=True):
            assert np.array_equal(ours, exact)
    masters, rounded = results[0]
    for master, bits in zip(masters.values(), rounded, strict=True):
        assert np.array_equal(make_ops("cpu", half).operand(master), bits)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.mpi(4)
def test_weights_and_gradients_travel_in_16_bits(comm, half, stage, accumulation):
    """Only whole gradients that micro-batches were added up in are 32-bit."""
    micro = f"train.micro_batch={6 // accumulation}"
    recipe = make_recipe(4, *mixed(half, f"parallel.zero={stage}", micro))
    sent, engine = count_step(recipe, comm)
    size = sum(unit.size for unit in engine.flat.units)
    item = 4 if accumulation > 1 and stage < 2 else 2
    if stage == 0:
        assert sent["grad", "all_reduce"] == (1, ring(4, size, item))
        return
    times = accumulation if stage >= 2 else 1
    assert sent["grad", "reduce_scatter"][1] == times * item * size * 3 // 4
    if stage < 3:
        assert sent["grad", "all_gather"][1] == 2 * size * 3 // 4


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.mpi(4)
def test_an_overflow_on_one_rank_is_skipped_by_all(comm, zero):
    recipe = make_recipe(4, *mixed("fp16", f"parallel.zero={zero}"))
    with layout_engine(recipe, comm) as engine:
        first = take_step(engine, make_batch(recipe, 0))
        assert first.updated and first.loss_scale == 4096
        before = [engine.state.masters.own(i).copy() for i in range(3)]
        if comm.rank == 2:
            engine.loss_scale.value = 1e30
        result = take_step(engine, make_batch(recipe, 1))
        if comm.rank == 2:
            engine.loss_scale.value = 2048.0
        assert not result.updated and engine.optimizer.count == 1
        for index, old in enumerate(before):
            assert np.array_equal(engine.state.masters.own(index), old)
        result = take_step(engine, make_batch(recipe, 2))
        assert result.updated and result.loss_scale == 2048
        assert engine.optimizer.count == 2
