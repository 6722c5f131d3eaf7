"""Whole models in mixed precision: near fp32, small updates kept, the loss scaled."""

from dataclasses import replace

import numpy as np
import pytest
from numeric import from_half, to_half
from parity.build import (
    count_valid,
    cut_batch,
    gradients,
    make_batch,
    make_recipe,
    scatter,
    serial_recipe,
)

from mpipar.engine import Engine
from mpipar.grid import serial_grid
from mpipar.layers.base import Step, nbytes
from mpipar.ops import Ops, make_ops
from mpipar.ops.half_ops import HalfOps
from mpipar.train.metrics import memory
from mpipar.zero.loss_scale import LossScale

HALVES = ["bf16", "fp16"]
WAYS = {
    "fast": lambda half: make_ops("cpu", half),
    "float32": HalfOps,
    "reference": lambda half: Ops(dtype="float32", half=half),
}


def engine_of(precision, *words, way="fast", micro=None):
    changes = [f"train.precision={precision}", *words]
    recipe = serial_recipe(make_recipe(1, *changes))
    if micro:
        train = recipe.train.model_copy(update={"micro_batch": micro})
        recipe = recipe.model_copy(update={"train": train})
    plain = precision in ("fp32", "fp64")
    ops = make_ops("cpu", precision) if plain else WAYS[way](precision)
    engine = Engine(recipe, serial_grid(), ops)
    scatter(engine)
    return engine


def first_gradients(engine):
    batch = make_batch(engine.recipe, 0)
    loss = engine.gradients([batch], count_valid(batch))
    scale = engine.loss_scale.value
    parts = [from_half(g).ravel() / scale for g in gradients(engine).values()]
    return loss, np.concatenate(parts).astype(np.float64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_nearly_the_loss_and_gradient_of_fp32(family, half, way):
    words = [f"model.family={family}"]
    loss, a = first_gradients(engine_of(half, *words, way=way))
    exact_loss, b = first_gradients(engine_of("fp32", *words))
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    assert loss != exact_loss
    assert a @ b / np.sqrt((a @ a) * (b @ b)) > 0.999
    assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(b), rel=1e-2)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_training_goes_where_fp32_goes(family, half):
    ends = []
    for precision in (half, "fp32"):
        engine = engine_of(precision, f"model.family={family}")
        batch = make_batch(engine.recipe, 0)
        results = [engine.step([batch], count_valid(batch)) for _ in range(25)]
        assert all(result.updated for result in results)
        losses = [result.loss for result in results]
        assert losses[-1] < 0.9 * losses[0]
        ends.append(losses[-1])
    assert ends[0] == pytest.approx(ends[1], rel=2e-2)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_what_layers_save_is_what_they_say(family, way, half):
    engine = engine_of(half, f"model.family={family}", way=way)
    batch = make_batch(engine.recipe, 0)
    labels = {"labels": batch.labels, "valid": count_valid(batch)}
    step = Step(np.arange(16), batch.samples, **labels)
    x, kept = batch.tokens, []
    for unit in engine.model.units:
        x, saved = unit.forward(x, step)
        assert nbytes(saved) == unit.cost(*batch.tokens.shape).saved
        kept.append(saved)
    dy = None
    for unit in reversed(engine.model.units):
        dy, left = unit.backward_input(dy, kept.pop())
        assert nbytes(left) == unit.cost(*batch.tokens.shape).left


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_memory_is_sixteen_bytes_a_weight(half, accumulation):
    """2 of values, 2 of gradients, 4 of masters, 8 of moments; gradients that several
    micro-batches add to are fp32."""
    engine = engine_of(half, micro=24 // accumulation)
    size = engine.flat.size
    grads = 2 if accumulation == 1 else 4
    kinds = ("params", "grads", "masters", "optimizer", "unit_buffers")
    found = [memory(engine)[kind] for kind in kinds]
    assert found == [2 * size, grads * size, 4 * size, 8 * size, 0]
    predicted = engine.predicted_memory()
    assert [predicted[kind] for kind in kinds] == found


@pytest.mark.parametrize("half", HALVES)
def test_micro_batches_are_added_up_in_float32(half):
    whole, parts = engine_of(half), engine_of(half, micro=1)
    batch = make_batch(whole.recipe, 0)
    for engine, batches in ((whole, [batch]), (parts, cut_batch(batch, 1))):
        engine.gradients(batches, count_valid(batch))
    a, b = (engine.flat.grad for engine in (whole, parts))
    assert b.dtype == np.float32
    a = from_half(a).astype(np.float64)
    # Each sequence's part is rounded by its operands only.
    assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(a)


def change_values(engine, name, value):
    for parameters in engine.state.whole_units("values"):
        for p in parameters:
            if p.name.endswith(name):
                assert p.data.dtype == np.float32
                p.data[...] = value


@pytest.mark.parametrize("half", HALVES)
def test_updates_too_small_for_16_bits_are_not_lost(half):
    """A16: a hundred steps of 0.001 from 1, each less than half a bf16 step."""
    engine = engine_of(half)
    change_values(engine, "norm1.gain", 1.0)
    gain = next(p for p in engine.flat.parameters if p.name.endswith("norm1.gain"))
    assert np.array_equal(from_half(gain.data), np.ones(32))
    engine.optimizer.hyper = replace(engine.optimizer.hyper, clip=0.0, eps=1e-30)
    engine.flat.grad[...] = to_half(np.ones(engine.flat.size, np.float32), half)
    for _ in range(100):
        assert engine.optimizer.update(1e-3, 1.0)
        engine.state.updated()
    masters = {}
    for parameters in engine.state.whole_units("values"):
        masters |= {p.name: p.data.copy() for p in parameters}
    master = masters["blocks.0.norm1.gain"]
    assert np.abs(master - 0.9).max() < 1e-5
    assert np.array_equal(gain.data, to_half(master, half))
    assert np.abs(from_half(gain.data) - 0.9).max() < 2e-3


# --- loss scaling -------------------------------------------------------------------


def test_a_scale_halves_at_once_and_doubles_after_a_while():
    scale = LossScale(8.0, 3)
    seen = []
    for good in (1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0):
        scale.note(good=bool(good))
        seen.append(scale.value)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8, 4, 2, 1, 1, 1]
    fixed = LossScale()
    for good in (True, False) * 3:
        fixed.note(good=good)
    assert fixed.value == 1.0


def test_an_overflow_skips_the_step_and_nothing_else():
    engine = engine_of("fp16", "train.loss_scale=1e9", "train.loss_scale_window=2")
    batch = make_batch(engine.recipe, 0)
    valid = count_valid(batch)
    before = engine.state.masters.own(1).copy()
    first = engine.step([batch], valid)
    assert not first.updated and first.loss_scale == 1e9
    assert np.isfinite(first.loss) and not np.isfinite(first.grad_norm)
    assert engine.optimizer.count == 0 and not engine.optimizer.m.any()
    assert np.array_equal(engine.state.masters.own(1), before)
    results = [engine.step([batch], valid) for _ in range(25)]
    scales = [result.loss_scale for result in results]
    skipped = [result.updated for result in results].index(True)
    assert scales[: skipped + 1] == [1e9 / 2**n for n in range(1, skipped + 2)]
    assert engine.optimizer.count == sum(result.updated for result in results)
    assert scales[skipped + 2] == 2 * scales[skipped]


def test_the_scale_changes_nothing_that_can_be_seen():
    results = []
    for scale in (1.0, 4096.0):
        engine = engine_of("fp16", f"train.loss_scale={scale}")
        batch = make_batch(engine.recipe, 0)
        steps = [engine.step([batch], count_valid(batch)) for _ in range(3)]
        results.append(([s.loss for s in steps], [s.grad_norm for s in steps]))
    for small, large in zip(*results, strict=True):
        assert small == pytest.approx(large, rel=2e-2)


def test_gradients_too_small_for_fp16_are_saved_by_the_scale():
    """Without a scale most gradients of a long batch are below fp16's smallest."""
    lost = []
    for scale in (1.0, 65536.0):
        engine = engine_of("fp16", f"train.loss_scale={scale}")
        batch = make_batch(engine.recipe, 0)
        engine.gradients([batch], 1000 * count_valid(batch))
        lost.append(np.mean(engine.flat.grad == 0))
    assert lost[0] > 3 * lost[1]
