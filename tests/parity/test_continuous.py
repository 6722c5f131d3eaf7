"""Training without a break between batches, against a serial loop with a delay of one:
W_k+1 = W_k − update(∇f_k(W_k−1))."""

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
    serial_engine,
    take_step,
    update,
    weights,
)

from mpipar.errors import ConfigError
from mpipar.pipeline.schedules import without_break
from mpipar.train.metrics import memory

STEPS = 5
LAYOUTS = [
    (1, "train.micro_batch=6"),
    (2, "parallel.pipeline=2 train.micro_batch=12"),
    (2, "parallel.pipeline=2 train.micro_batch=4 model.tied=false"),
    (2, "parallel.pipeline=2 train.micro_batch=3 train.recompute=full"),
    (2, "train.micro_batch=4 parallel.zero=2"),
    (3, "parallel.pipeline=3 train.micro_batch=4 model.layers=5 model.dropout=0.1"),
    (4, "parallel.pipeline=4 train.micro_batch=3 model.layers=3"),
    (4, "parallel.pipeline=4 train.micro_batch=6 model.family=llama"),
    *(
        (4, f"parallel.pipeline=2 train.micro_batch=3 parallel.zero={z}")
        for z in range(4)
    ),
    (
        4,
        "parallel.pipeline=2 parallel.tensor=2 parallel.sequence=true "
        "train.micro_batch=2",
    ),
    (8, "parallel.pipeline=4 parallel.zero=3 train.micro_batch=2 parallel.prefetch=0"),
    (8, "parallel.pipeline=2 parallel.tensor=2 parallel.zero=1 train.micro_batch=2"),
]


def delayed(recipe):
    """Losses, norms, gradients and last weights of the serial loop."""
    engine = serial_engine(recipe)
    held, results = [weights(engine)], []
    for step in range(STEPS):
        put(engine, held[max(step - 1, 0)])
        batch = make_batch(recipe, step)
        valid = count_valid(batch)
        engine.number = step
        loss = engine.gradients([batch], valid) / valid
        norm = engine.optimizer.square_norm() ** 0.5
        results.append((loss, norm, gradients(engine)))
        put(engine, held[step])
        update(engine, step, norm)
        held.append(weights(engine))
    return results, held[-1]


def put(engine, values):
    """Sets all weights."""
    for p in engine.state.parameters:
        p.data[...] = values[p.name]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [pytest.param(n, w, marks=pytest.mark.mpi(n), id=f"{n} {w}") for n, w in LAYOUTS],
)
def test_it_is_the_serial_loop_with_a_delay(comm, ranks, words):
    recipe = make_recipe(ranks, "parallel.schedule=2bw", *words.split())
    results, last = delayed(recipe)
    errors = {}
    with layout_engine(recipe, comm) as engine:
        for step in range(STEPS + 1):
            if step < STEPS:
                result = take_step(engine, make_batch(recipe, step))
            else:
                result = engine.drain()
            assert engine.number == step and (result is None) == (step == 0)
            if result is None:
                continue
            assert engine.begun == min(step + 1, STEPS)
            loss, norm, grads = results[step - 1]
            errors[step, "loss"] = off(result.loss, loss)
            errors[step, "norm"] = off(result.grad_norm, norm)
            found = box_errors(engine, "gradients", grads, find_idle(grads))
            errors |= {(step, name): error for name, error in found.items()}
        idle = set.intersection(*(find_idle(g) for *_, g in results))
        errors |= box_errors(engine, "values", last, idle)
        assert engine.executor._saved == engine.executor._left == {}
    assert {k: e for k, e in errors.items() if not e <= FP64} == {}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.mpi(4)
def test_it_holds_two_of_everything_but_the_moments(comm, zero):
    words = ["parallel.pipeline=2", "train.micro_batch=3", f"parallel.zero={zero}"]
    found = []
    for schedule in ("1f1b", "2bw"):
        recipe = make_recipe(4, *words, f"parallel.schedule={schedule}")
        with layout_engine(recipe, comm) as engine:
            for step in range(3):
                take_step(engine, make_batch(recipe, step))
            held = memory(engine)
            del held["rss_peak"]
            assert held == engine.predicted_memory()
            found.append(held)
            engine.drain()
            assert memory(engine)["activations_peak"] == held["activations_peak"]
    for kind, size in found[0].items():
        twice = kind not in ("optimizer", "activations_peak")
        assert found[1][kind] == size * (2 if twice else 1), kind


@pytest.mark.mpi(2)
def test_one_may_look_and_go_on_in_between(comm):
    """Evaluation while a batch is open changes nothing; a drain begins anew."""
    words = ["parallel.pipeline=2", "parallel.schedule=2bw", "train.micro_batch=4"]
    recipe = make_recipe(2, *words)
    ends = []
    for looks in (False, True):
        with layout_engine(recipe, comm) as engine:
            for step in range(4):
                take_step(engine, make_batch(recipe, step))
                if looks and step:
                    batch = make_batch(recipe, 9)
                    engine.evaluate(own_batches(engine, batch), count_valid(batch))
            engine.drain()
            assert engine.drain() is None
            for step in range(4, 6):
                take_step(engine, make_batch(recipe, step))
            assert engine.drain().updated
            assert engine.number == engine.begun == 6
            ends.append(weights(engine))
    for name, exact in ends[0].items():
        assert np.array_equal(ends[1][name], exact)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.mpi(2)
def test_in_mixed_precision(comm, half):
    words = ["parallel.pipeline=2", "parallel.schedule=2bw", "train.micro_batch=4"]
    losses = []
    for precision in ("fp32", half):
        recipe = make_recipe(2, *words, f"train.precision={precision}")
        with layout_engine(recipe, comm) as engine:
            batch = make_batch(recipe, 0)
            for _ in range(20):
                take_step(engine, batch)
            losses.append(engine.drain().loss)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_stages_of_one_batch_follow_each_other():
    text = [" ".join(map(str, without_break(3, s, 4))) for s in range(3)]
    assert text == [
        "F0 BW-2 F1 BW-1 F2 BW0 F3 BW1",
        "F0 BW-1 F1 BW0 F2 BW1 F3 BW2",
        "F0 BW0 F1 BW1 F2 BW2 F3 BW3",
    ]


def test_fewer_micro_batches_than_stages_are_refused():
    words = ["parallel.pipeline=4", "parallel.schedule=2bw", "train.micro_batch=8"]
    with pytest.raises(ConfigError, match="needs at least 4 micro-batches on 4 stages"):
        make_recipe(4, *words)


@pytest.mark.mpi(2)
def test_an_overflow_is_skipped_without_a_word(comm):
    words = ["parallel.pipeline=2", "parallel.schedule=2bw", "train.micro_batch=4"]
    words += ["train.precision=fp16", "train.loss_scale=1e9"]
    with layout_engine(make_recipe(2, *words), comm) as engine:
        results = [take_step(engine, make_batch(engine.recipe, 0)) for _ in range(25)]
        results = [*results[1:], engine.drain()]
    scales = [result.loss_scale for result in results]
    skipped = [result.updated for result in results].index(True)
    # The scale of a batch is chosen before the one before it is known to overflow.
    assert skipped > 5 and scales[:4] == [1e9, 1e9, 5e8, 2.5e8]
    assert engine.optimizer.count == sum(result.updated for result in results)
