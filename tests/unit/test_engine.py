"""The engine on one rank: start, schedule, skipped steps, accumulation, evaluation."""

import math

import numpy as np
import pytest
from parity.build import (
    count_valid,
    cut_batch,
    gradients,
    make_batch,
    make_recipe,
    region,
    serial_engine,
    take_step,
    weights,
)

from mpipar.comm import NullCommunicator
from mpipar.engine import Engine
from mpipar.engine.learning_rate import learning_rate
from mpipar.errors import ShapeError
from mpipar.grid import serial_grid
from mpipar.models import build_model
from mpipar.ops import make_ops
from mpipar.pipeline.schedules import Action, forward_only, single_stage
from mpipar.zero.flat import FlatState

FAMILIES = ("gpt", "llama")


def fresh_engine(*words: str) -> Engine:
    """An engine as a run starts, its weights not moved."""
    recipe = make_recipe(1, *words)
    return Engine(recipe, serial_grid(), make_ops("cpu", recipe.train.precision))


def state(engine: Engine) -> list[np.ndarray]:
    flat, optimizer = engine.flat, engine.optimizer
    return [x.copy() for x in (flat.data, optimizer.m, optimizer.v)]


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# Initial weights


def on_rank(tp: int, rank: int) -> NullCommunicator:
    """A tp axis for building a model only: nothing is ever sent."""
    axis = NullCommunicator("tp")
    axis.size, axis.rank = tp, rank
    return axis


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_initial_weights_are_the_same_in_every_layout(family, tp, sequence):
    words = [f"model.family={family}", "model.kv_heads=2", "model.tied=false"]
    whole = fresh_engine(*words)
    exact, ops = weights(whole), whole.ops
    covered = {name: np.zeros(x.shape, int) for name, x in exact.items()}
    for rank in range(tp):
        model = build_model(
            whole.recipe.model, ops=ops, tp=on_rank(tp, rank), sequence=sequence
        )
        flat = FlatState(model.groups().parameters, ops)
        flat.initialize(whole.recipe.train.seed)
        assert {p.name for p in flat.parameters} == set(exact)
        for p in flat.parameters:
            assert np.array_equal(p.data, exact[p.name][region(p)]), p.name
            covered[p.name][region(p)] += p.owner
    # Every element has one owner.
    assert all((count == 1).all() for count in covered.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_start_as_the_recipe_says(family):
    for name, x in weights(fresh_engine(f"model.family={family}")).items():
        if name.endswith(".gain"):
            assert (x == 1.0).all()
        elif name.endswith(".bias"):
            assert (x == 0.0).all()
        else:
            branch_end = name.split(".")[-2] in ("out", "down")
            std = 0.02 / math.sqrt(2 * 2) if branch_end else 0.02
            assert x.std() == pytest.approx(std, rel=0.1), name
            assert abs(x.mean()) < 0.1 * std


def test_another_seed_gives_other_weights():
    first, second = (weights(fresh_engine(f"train.seed={n}")) for n in (1, 2))
    name = "blocks.0.mlp.up.weight"
    assert abs(np.corrcoef(first[name].ravel(), second[name].ravel())[0, 1]) < 0.1


# Learning rate


def test_the_rate_rises_linearly_and_falls_as_a_cosine():
    recipe = make_recipe(
        1, "optimizer.lr=0.5", "optimizer.warmup=4", "train.steps=13",
        "optimizer.min_lr=0.2",
    )  # fmt: skip
    rates = [learning_rate(recipe, step) for step in range(14)]
    assert rates[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    assert rates[8] == pytest.approx(0.3)
    assert rates[12] == pytest.approx(0.1)
    assert rates[13] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[4:12], rates[5:13], strict=True))


def test_the_constant_rate_stays():
    recipe = make_recipe(
        1, "optimizer.lr=0.5", "optimizer.warmup=1", "optimizer.schedule=constant"
    )
    assert [learning_rate(recipe, step) for step in (0, 1, 5, 99)] == [0.5] * 4


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (5, 5)]
)
def test_very_short_runs_have_a_rate(steps, warmup):
    recipe = make_recipe(1, f"train.steps={steps}", f"optimizer.warmup={warmup}")
    for step in range(steps):
        assert 0 < learning_rate(recipe, step) <= recipe.optimizer.lr


def test_a_step_reports_the_rate_it_used():
    engine = fresh_engine()
    for step in range(4):
        result = take_step(engine, make_batch(engine.recipe, step))
        assert result.lr == learning_rate(engine.recipe, step)


# The update


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_is_for_matrices_only(monkeypatch, family):
    """A18: all ones, no gradient, rate 0.1, decay 0.1: matrices 0.99, others 1."""
    words = ["optimizer.lr=0.1", "optimizer.weight_decay=0.1", "optimizer.warmup=0"]
    engine = fresh_engine(f"model.family={family}", "model.tied=false", *words)
    engine.flat.data[...] = 1.0
    monkeypatch.setattr(engine, "gradients", lambda batches, valid: 0.0)
    assert engine.step([], 1).updated
    for p in engine.flat.parameters:
        if p.name.endswith(".weight"):
            assert abs(p.data - 0.99).max() < 1e-15, p.name
        else:
            assert (p.data == 1.0).all(), p.name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_with_a_bad_gradient_is_skipped(monkeypatch, value):
    engine = serial_engine(make_recipe(1))
    take_step(engine, make_batch(engine.recipe, 0))
    before, gradients_of = state(engine), engine.gradients

    def spoil(batches, valid):
        loss = gradients_of(batches, valid)
        engine.flat.grad[17] = value
        return loss

    monkeypatch.setattr(engine, "gradients", spoil)
    result = take_step(engine, make_batch(engine.recipe, 1))
    assert not result.updated
    assert not math.isfinite(result.grad_norm)
    assert equal(state(engine), before)
    assert engine.optimizer.count == 1
    # The data and the rate go on.
    assert engine.number == 2
    monkeypatch.undo()
    assert take_step(engine, make_batch(engine.recipe, 2)).updated
    assert engine.optimizer.count == 2
    assert np.isfinite(engine.flat.data).all()


def test_a_large_gradient_is_clipped_to_the_limit():
    engine = fresh_engine("train.clip=0.25")
    factor = engine.optimizer.clip_factor
    assert factor(0.2) == 1.0
    assert factor(1.0) == pytest.approx(0.25 / (1.0 + 1e-6), rel=1e-15)
    assert fresh_engine("train.clip=0").optimizer.clip_factor(1e9) == 1.0


def test_the_loss_falls():
    engine = fresh_engine("train.steps=30", "optimizer.lr=0.03")
    batch = make_batch(engine.recipe, 0)
    losses = [take_step(engine, batch).loss for _ in range(30)]
    assert losses[0] == pytest.approx(math.log(101), abs=0.05)
    assert losses[-1] < 0.7 * losses[0]


# Micro-batches


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("micro", [24, 12, 8, 1])
def test_accumulation_does_not_change_the_gradient(family, micro):
    words = [f"model.family={family}", "model.dropout=0.1", "train.global_batch=24"]
    engine = serial_engine(make_recipe(1, *words))
    batch = make_batch(engine.recipe, 0)
    valid = count_valid(batch)
    loss, exact = engine.gradients([batch], valid), gradients(engine)
    parts = cut_batch(batch, micro)
    assert engine.gradients(parts, valid) == pytest.approx(loss, rel=1e-13)
    size = np.linalg.norm(engine.flat.grad)
    for name, x in gradients(engine).items():
        assert np.linalg.norm(x - exact[name]) < 1e-14 * size, name


def test_gradients_start_from_zero_each_time():
    engine = serial_engine(make_recipe(1))
    batch = make_batch(engine.recipe, 0)
    engine.gradients([batch], 10)
    once = engine.flat.grad.copy()
    engine.gradients([batch], 10)
    assert np.array_equal(engine.flat.grad, once)


# Evaluation


def test_evaluation_changes_nothing():
    words = ["model.dropout=0.1"]
    engine, other = (serial_engine(make_recipe(1, *words)) for _ in range(2))
    held_out = make_batch(engine.recipe, 99)
    for step in range(3):
        before, number = state(engine), engine.number
        found = {engine.evaluate([held_out], count_valid(held_out)) for _ in range(2)}
        assert len(found) == 1
        assert equal(state(engine), before)
        assert engine.number == number
        batch = make_batch(engine.recipe, step)
        assert take_step(engine, batch) == take_step(other, batch)
    assert equal(state(engine), state(other))


def test_evaluation_draws_no_dropout():
    engine = serial_engine(make_recipe(1, "model.dropout=0.5"))
    plain = serial_engine(make_recipe(1))
    batch = make_batch(engine.recipe, 0)
    assert engine.evaluate([batch], 1) == plain.evaluate([batch], 1)
    assert take_step(engine, batch).loss != take_step(plain, batch).loss


def test_evaluation_is_a_mean_over_all_rounds():
    engine = serial_engine(make_recipe(1))
    batch = make_batch(engine.recipe, 0)
    valid = count_valid(batch)
    whole = engine.evaluate([batch], valid)
    parts = cut_batch(batch, 5)
    assert engine.evaluate(parts, valid) == pytest.approx(whole, rel=1e-14)
    assert engine.evaluate([], 0) == 0.0


# What is in flight


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_leaves_nothing_in_flight(family):
    engine = serial_engine(make_recipe(1, f"model.family={family}"))
    cost = engine.model.cost(8, 16).saved
    batch = make_batch(engine.recipe, 0)
    engine.gradients([batch], 1)
    assert engine.executor._saved == engine.executor._left == {}
    assert engine.executor.peak_bytes == 3 * cost
    assert engine.executor.peak_in_flight == 1
    engine.evaluate([batch], 1)
    assert engine.executor._saved == {}
    assert engine.executor.peak_bytes == 0


def run_actions(actions: list[Action]) -> list[float]:
    engine = serial_engine(make_recipe(1))
    batches = cut_batch(make_batch(engine.recipe, 0), 12)
    engine.state.begin()
    return engine._run(actions, batches, 1, training=True)


def test_a_schedule_that_leaves_something_in_flight_is_refused():
    forward = [Action("F", 0), Action("F", 1)]
    with pytest.raises(ShapeError, match=r"\[\(0, 1\)\]"):
        run_actions([*forward, Action("BW", 0)])
    with pytest.raises(ShapeError, match=r"\[\(0, 0\)\]"):
        run_actions([*forward, Action("BW", 1), Action("B", 0)])
    in_order = run_actions(single_stage(2))
    assert run_actions([*forward, Action("BW", 1), Action("BW", 0)]) == in_order


def test_schedules_of_one_stage_read_as_their_text():
    assert " ".join(map(str, single_stage(2))) == "F0 BW0 F1 BW1"
    assert " ".join(map(str, forward_only(3))) == "F0 F1 F2"
