"""Runs without a break between batches, and in other precisions, that go on."""

import numpy as np
import pytest
from parity.build import (
    FP64,
    box_errors,
    count_valid,
    find_idle,
    gradients,
    layout_engine,
    make_batch,
    make_recipe,
    off,
    own_batches,
    read_arrays,
    save_engine,
    serial_engine,
    take_step,
    update,
    weights,
)
from parity.test_continuous import put
from parity.test_resume import differ, state_of

from mpipar.checkpoint import read_manifest
from mpipar.engine import finite


def restore(engine, folder):
    engine.restore(folder, read_manifest(folder))


# Training without a break between batches


def serial_loop(recipe, seen):
    """Losses, norms and last weights where batch k sees the weights of seen[k] updates.

    A plain run is 0, 1, 2, …; 2bw is 0, 0, 1, 2, …
    """
    engine = serial_engine(recipe)
    held, results = [weights(engine)], []
    for step, version in enumerate(seen):
        put(engine, held[version])
        batch = make_batch(recipe, step)
        valid = count_valid(batch)
        engine.number = step
        loss = engine.gradients([batch], valid) / valid
        norm = engine.optimizer.square_norm() ** 0.5
        results.append((loss, norm))
        idle = find_idle(gradients(engine))
        put(engine, held[step])
        update(engine, step, norm)
        held.append(weights(engine))
    return results, held[-1], idle


def train(engine, first, last):
    """Results of these batches, the last of which is ended as well."""
    found = [
        take_step(engine, make_batch(engine.recipe, s)) for s in range(first, last)
    ]
    found.append(engine.drain())
    return [(r.loss, r.grad_norm, r.lr) for r in found if r is not None]


def errors_after(engine, results, exact, begin):
    """What differs from the serial loop after its last batch."""
    expected, last, idle = exact
    found = box_errors(engine, "values", last, idle)
    for step, (loss, norm, _) in enumerate(results, begin):
        found[f"loss {step}"] = off(loss, expected[step][0])
        found[f"norm {step}"] = off(norm, expected[step][1])
    return {k: e for k, e in found.items() if not e <= FP64}


BATCH = "train.global_batch=12"
EXPERTS = "experts.count=4 experts.bias_rate=0.01 experts.balance=0.1"
TWO_BW = ["parallel.schedule=2bw", "model.dropout=0.1", "model.layers=4", BATCH]


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (
            "parallel.pipeline=4 train.micro_batch=3",
            "parallel.pipeline=2 parallel.zero=3 train.micro_batch=3",
        ),
        pytest.param(
            "parallel.pipeline=2 parallel.zero=2 train.micro_batch=1",
            "parallel.pipeline=2 parallel.tensor=2 train.micro_batch=6",
            marks=pytest.mark.full,
        ),
        (
            f"{EXPERTS} parallel.pipeline=2 parallel.expert=2 train.micro_batch=3",
            f"{EXPERTS} parallel.pipeline=2 parallel.tensor=2 parallel.expert_tensor=1 "
            "parallel.expert=2 train.micro_batch=6",
        ),
    ],
    ids=str,
)
@pytest.mark.mpi(4)
def test_an_open_batch_is_worked_on_again(comm, tmp_path, words, other):
    run = comm.bcast(tmp_path)
    recipe = make_recipe(comm.size, *TWO_BW, *words.split())
    with layout_engine(recipe, comm) as engine:
        unbroken = train(engine, 0, 6)
        state = state_of(engine)
    with layout_engine(recipe, comm) as engine:
        for step in range(3):
            take_step(engine, make_batch(recipe, step))
        assert (engine.number, engine.begun) == (2, 3)
        folder = save_engine(engine, run)
        batch = make_batch(recipe, 9)
        look = [engine.evaluate(own_batches(engine, batch), count_valid(batch))]
        # Messages that nobody received would reach the next engine.
        engine.drain()
    with layout_engine(recipe, comm) as engine:
        restore(engine, folder)
        assert (engine.number, engine.begun) == (2, 2)
        look.append(engine.evaluate(own_batches(engine, batch), count_valid(batch)))
        assert look[0] == look[1]
        assert train(engine, 2, 6) == unbroken[2:]
        assert state_of(engine) == state
    exact = serial_loop(recipe, [0, 0, 1, 2, 3, 4])
    with layout_engine(make_recipe(comm.size, *TWO_BW, *other.split()), comm) as engine:
        restore(engine, folder)
        again = save_engine(engine, run / "again")
        if comm.rank == 0:
            assert differ(read_arrays(again), read_arrays(folder)) == []
        assert errors_after(engine, train(engine, 2, 6), exact, 2) == {}


@pytest.mark.parametrize(
    ("schedule", "then", "seen"),
    [
        # The batch that is open when 2bw is left sees the latest weights.
        ("2bw", "1f1b", [0, 0, 2, 3]),
        # A plain checkpoint has no earlier weights: two batches see the same.
        ("1f1b", "2bw", [0, 1, 2, 2, 3]),
    ],
)
@pytest.mark.mpi(4)
def test_the_schedule_may_change(comm, tmp_path, schedule, then, seen):
    words = ["parallel.pipeline=2", "train.micro_batch=3", "parallel.zero=1"]
    recipe = make_recipe(4, *words, *TWO_BW, f"parallel.schedule={schedule}")
    with layout_engine(recipe, comm) as engine:
        for step in range(3 if schedule == "2bw" else 2):
            take_step(engine, make_batch(recipe, step))
        folder = save_engine(engine, comm.bcast(tmp_path))
        engine.drain()
    words = ["parallel.pipeline=4", "train.micro_batch=3"]
    recipe = make_recipe(4, *words, *TWO_BW, f"parallel.schedule={then}")
    exact = serial_loop(recipe, seen)
    with layout_engine(recipe, comm) as engine:
        restore(engine, folder)
        results = train(engine, 2, len(seen))
        assert errors_after(engine, results, exact, 2) == {}


@pytest.mark.mpi(4)
def test_after_a_drain_it_begins_anew(comm, tmp_path):
    recipe = make_recipe(4, *TWO_BW, "parallel.pipeline=2", "train.micro_batch=3")
    with layout_engine(recipe, comm) as engine:
        train(engine, 0, 3)
        folder = save_engine(engine, comm.bcast(tmp_path))
        unbroken = train(engine, 3, 6), state_of(engine)
    exact = serial_loop(recipe, [0, 0, 1, 3, 3, 4])
    with layout_engine(recipe, comm) as engine:
        restore(engine, folder)
        results = train(engine, 3, 6)
        assert (results, state_of(engine)) == unbroken
        assert errors_after(engine, results, exact, 3) == {}


# Precisions

DP, TP = "train.micro_batch=3 parallel.zero=1", "parallel.tensor=2 parallel.zero=3"


def halved(half, words, *more):
    scale = ["train.loss_scale=1e8", "train.loss_scale_window=4"]
    words = [*words.split(), f"train.precision={half}", BATCH]
    return make_recipe(4, *scale, *words, *more)


@pytest.mark.parametrize(
    ("half", "scale", "schedule"),
    [
        ("fp16", 1e8, "2bw"),
        pytest.param("fp16", 256, "1f1b", marks=pytest.mark.full),
        pytest.param("bf16", 1, "2bw", marks=pytest.mark.full),
        pytest.param("bf16", 1, "1f1b", marks=pytest.mark.full),
        pytest.param("fp16", 1e8, "1f1b", marks=pytest.mark.full),
        pytest.param("fp16", 256, "2bw", marks=pytest.mark.full),
    ],
)
@pytest.mark.mpi(4)
def test_a_run_in_16_bits_goes_on(comm, tmp_path, half, scale, schedule):
    """Masters, loss scale and good steps come back, in every layout."""
    more = f"parallel.schedule={schedule}", f"train.loss_scale={scale}"
    run, begin, end = comm.bcast(tmp_path), 17, 23
    with layout_engine(halved(half, DP, *more), comm) as engine:
        unbroken = numbers([*steps(engine, 0, end), engine.drain()])
        state = state_of(engine)
    skipped = [updated for *_, updated, _ in unbroken].count(False)
    assert skipped > 2 if scale == 1e8 else skipped == 0
    with layout_engine(halved(half, DP, *more), comm) as engine:
        steps(engine, 0, begin + (schedule == "2bw"))
        folder = save_engine(engine, run)
        engine.drain()
    progress, expected = read_manifest(folder).progress, unbroken[begin:]
    assert progress.step == begin == progress.updates + skipped_by(unbroken, begin)
    if half == "fp16":
        assert progress.loss_scale != scale
        assert progress.good_steps > 0 or scale == 1e8
    for words in (DP, TP):
        with layout_engine(halved(half, words, *more), comm) as engine:
            restore(engine, folder)
            again = save_engine(engine, run / words)
            if comm.rank == 0:
                assert differ(read_arrays(again), read_arrays(folder)) == []
                assert read_manifest(again).progress == progress
            results = numbers([*steps(engine, begin, end), engine.drain()])
            if words == DP:
                assert (results, state_of(engine)) == (expected, state)
            # Where an overflow begins is a matter of rounding.
            alike = 1 if scale == 1e8 else len(results)
            for ours, exact in zip(results[:alike], expected, strict=False):
                assert ours[0] == pytest.approx(exact[0], rel=5e-3)
                assert ours[-1] == exact[-1]


def steps(engine, first, last):
    return [take_step(engine, make_batch(engine.recipe, 0)) for _ in range(first, last)]


def numbers(results):
    return [
        (r.loss, finite(r.grad_norm), r.lr, r.updated, r.loss_scale)
        for r in results
        if r is not None
    ]


def skipped_by(results, step):
    return [updated for *_, updated, _ in results[:step]].count(False)


@pytest.mark.parametrize(
    ("precision", "then"),
    [
        ("fp32", "fp64"),
        ("fp32", "fp16"),
        pytest.param("fp64", "bf16", marks=pytest.mark.full),
        pytest.param("fp64", "fp32", marks=pytest.mark.full),
        pytest.param("bf16", "fp32", marks=pytest.mark.full),
        pytest.param("fp32", "bf16", marks=pytest.mark.full),
        pytest.param("fp16", "bf16", marks=pytest.mark.full),
    ],
)
@pytest.mark.mpi(4)
def test_the_precision_may_change(comm, tmp_path, precision, then):
    run = comm.bcast(tmp_path)
    with layout_engine(halved(precision, DP), comm) as engine:
        steps(engine, 0, 16)
        folder = save_engine(engine, run)
        following = steps(engine, 16, 17)[0]
    with layout_engine(halved(then, TP), comm) as engine:
        restore(engine, folder)
        again = save_engine(engine, run / "again")
        if comm.rank == 0:
            found, expected = read_arrays(again), read_arrays(folder)
            for name, x in expected.items():
                kind = np.float64 if then == "fp64" else np.float32
                assert found[name].dtype == kind
                assert np.array_equal(found[name], x.astype(kind)), name
        if then == "fp16":
            assert engine.loss_scale.value == engine.recipe.train.loss_scale
            engine.loss_scale.value = 1024.0
        result = steps(engine, 16, 17)[0]
    half = 2e-2 if {precision, then} & {"bf16", "fp16"} else 1e-4
    assert result.updated
    assert result.loss == pytest.approx(following.loss, rel=half)
