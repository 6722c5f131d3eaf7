"""Faults of gradients that people really met: norms, replicas, means of means."""

import math

import numpy as np
import pytest
from parity.build import (
    FP64,
    IGNORE,
    Batch,
    box_errors,
    cut_batch,
    find_idle,
    gradients,
    layout_engine,
    make_batch,
    make_recipe,
    own_batches,
    region,
    serial_engine,
    take_step,
    weights,
)


def ranks(*counts):
    return [pytest.param(n, marks=pytest.mark.mpi(n)) for n in counts]


# The norm


def plant_gradients(engine, monkeypatch):
    """One cut weight's gradient gets norm 4, one replicated gain's 3, others 0."""
    planted = {"blocks.1.mlp.up.weight": 4.0, "head.norm.gain": 3.0}

    def fill(batches, valid):
        engine.flat.grad[...] = 0.0
        for p in engine.flat.parameters:
            if p.name in planted:
                whole = np.arange(1.0, math.prod(p.shape) + 1).reshape(p.shape)
                whole *= planted[p.name] / np.linalg.norm(whole)
                p.grad[...] = whole[region(p)]
        return 0.0

    monkeypatch.setattr(engine, "gradients", fill)


@pytest.mark.parametrize("tp", ranks(1, 2, 4))
@pytest.mark.parametrize("sequence", ["false", "true"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_norm_counts_replicated_tensors_once(
    comm, monkeypatch, tp, sequence, family
):
    """A01: 5.000, not the 5.831 of a gain counted twice; then the clipped update."""
    words = [f"parallel.sequence={sequence}", f"model.family={family}"]
    recipe = make_recipe(tp, f"parallel.tensor={tp}", *words)
    serial = serial_engine(recipe)
    plant_gradients(serial, monkeypatch)
    exact = serial.step([], 1)
    assert exact.grad_norm == pytest.approx(5.0, rel=1e-14)
    with layout_engine(recipe, comm) as engine:
        plant_gradients(engine, monkeypatch)
        result = engine.step([], 1)
        assert result.grad_norm == pytest.approx(5.0, rel=1e-14)
        clip = engine.optimizer.clip_factor(result.grad_norm)
        assert clip == pytest.approx(0.5 / (5.0 + 1e-6), rel=1e-14)
        found = box_errors(engine, "values", weights(serial), set())
        assert max(found.values()) < 1e-14


@pytest.mark.parametrize("dp", ranks(2, 4))
def test_the_norm_counts_data_replicas_once(comm, monkeypatch, dp):
    """A01: the gradient is equal on all data ranks and counts once."""
    with layout_engine(make_recipe(dp), comm) as engine:
        plant_gradients(engine, monkeypatch)
        assert engine.step([], 1).grad_norm == pytest.approx(5.0, rel=1e-14)


# Replicated gradients under sequence parallelism


def gains(engine):
    return [p for p in engine.flat.parameters if ".norm" in p.name]


@pytest.mark.parametrize("tp", ranks(2, 4))
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_norm_gradients_are_sums_over_the_slices(comm, tp, family):
    """A02: every norm, the last one too, on every rank; 5 steps keep them equal."""
    words = ["parallel.sequence=true", f"model.family={family}"]
    recipe = make_recipe(tp, f"parallel.tensor={tp}", *words)
    serial = serial_engine(recipe)
    take_step(serial, make_batch(recipe, 0))
    with layout_engine(recipe, comm) as engine:
        take_step(engine, make_batch(recipe, 0))
        found = box_errors(engine, "gradients", gradients(serial), set())
        names = [p.name for p in gains(engine)]
        assert len(names) == 5 * (2 if family == "gpt" else 1)
        assert "head.norm.gain" in names
        assert max(found[name] for name in names) < FP64
        assert_equal_on_all_ranks(comm, [p.grad for p in gains(engine)])
        for step in range(1, 5):
            take_step(engine, make_batch(recipe, step))
        assert_equal_on_all_ranks(comm, [p.data for p in gains(engine)])


def assert_equal_on_all_ranks(comm, arrays):
    seen = comm.allgather(b"".join(x.tobytes() for x in arrays))
    assert len(set(seen)) == 1


@pytest.mark.parametrize(
    ("tp", "sequence"),
    [
        pytest.param(tp, sequence, marks=pytest.mark.mpi(2 * tp))
        for tp in (1, 2, 4)
        for sequence in ("false", "true")
    ],
)
def test_replicas_stay_equal_to_the_bit(comm, tp, sequence):
    words = [f"parallel.sequence={sequence}", "model.kv_heads=1"]
    recipe = make_recipe(2 * tp, f"parallel.tensor={tp}", *words)
    with layout_engine(recipe, comm) as engine:
        for step in range(3):
            take_step(engine, make_batch(recipe, step))
        assert_equal_on_all_ranks(engine.grid.dp.mpi, [engine.flat.data])
        copies = [p for p in engine.flat.parameters if p.local_shape == p.shape]
        assert_equal_on_all_ranks(comm, [p.data for p in copies])


# Means


def known_loss_engine(engine):
    """Give id 3 a loss of 2.0 and id 5 one of 7.0 at every position.

    The final norm returns the same unit vector for all tokens, so that the first
    column of the head holds the logits.
    """
    odds = np.full(101, (1 - math.exp(-2) - math.exp(-7)) / 99)
    odds[3], odds[5] = math.exp(-2), math.exp(-7)
    for p in engine.flat.parameters:
        if p.name == "head.norm.gain":
            p.data[...] = 0.0
        if p.name == "head.norm.bias":
            p.data[...] = 0.0
            p.data[0] = 1.0
        if p.name == "head.weight":
            p.data[:, 0] = np.log(odds)[region(p)[0]]


def uneven_batch(recipe) -> Batch:
    """Sequence 0 has 8 labels of loss 2.0, sequence 1 two of loss 7.0."""
    tokens = np.arange(32).reshape(2, 16)
    labels = np.full((2, 16), IGNORE)
    labels[0, 2:10] = 3
    labels[1, [4, 11]] = 5
    return Batch(tokens, labels, np.arange(2))


SPLITS = [
    pytest.param(tp, dp, micro, marks=pytest.mark.mpi(tp * dp))
    for tp, dp in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 2))
    for micro in ((1, 2) if dp == 1 else (1,))
]


@pytest.mark.parametrize(("tp", "dp", "micro"), SPLITS)
def test_the_loss_is_a_mean_over_tokens_however_they_are_split(comm, tp, dp, micro):
    """A05 (a): 3.0, not the 4.5 of a mean of means; gradients as on one rank."""
    words = ["model.tied=false", "train.global_batch=2", f"train.micro_batch={micro}"]
    recipe = make_recipe(tp * dp, f"parallel.tensor={tp}", *words)
    batch = uneven_batch(recipe)
    serial = serial_engine(recipe)
    known_loss_engine(serial)
    serial.gradients([batch], 10)
    exact = gradients(serial)
    with layout_engine(recipe, comm) as engine:
        known_loss_engine(engine)
        engine.gradients(own_batches(engine, batch), 10)
        found = box_errors(engine, "gradients", exact, find_idle(exact))
        assert max(found.values()) < FP64
        assert take_step(engine, batch).loss == pytest.approx(3.0, rel=1e-13)


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.mpi(2)
def test_a_data_rank_without_labels_adds_nothing(comm, micro):
    """A05 (b): the same as the data of rank 0 alone."""
    words = ["train.global_batch=12", f"train.micro_batch={micro}"]
    recipe = make_recipe(2, *words)
    batch = make_batch(recipe, 0)
    batch.labels[6:] = IGNORE
    serial = serial_engine(recipe)
    exact = take_step(serial, cut_batch(batch, 6)[0])
    with layout_engine(recipe, comm) as engine:
        result = take_step(engine, batch)
        assert result.loss == pytest.approx(exact.loss, rel=FP64)
        assert result.grad_norm == pytest.approx(exact.grad_norm, rel=FP64)
        grads = gradients(serial)
        found = box_errors(engine, "gradients", grads, find_idle(grads))
        assert max(found.values()) < FP64


@pytest.mark.parametrize(
    ("tp", "dp", "sequence"),
    [
        pytest.param(tp, dp, sequence, marks=pytest.mark.mpi(tp * dp))
        for tp, dp, sequence in ((1, 1, "false"), (1, 2, "false"), (2, 2, "true"))
    ],
)
def test_a_step_without_any_label_changes_no_gradient(comm, tp, dp, sequence):
    """A05 (c): loss 0, gradient 0, and nothing that is no number."""
    words = [f"parallel.sequence={sequence}", f"parallel.tensor={tp}"]
    recipe = make_recipe(tp * dp, *words)
    batch = make_batch(recipe, 0)
    batch.labels[...] = IGNORE
    with layout_engine(recipe, comm) as engine:
        result = take_step(engine, batch)
        assert result.loss == 0.0
        assert result.grad_norm == 0.0
        assert not engine.flat.grad.any()
        assert np.isfinite(engine.flat.data).all()
