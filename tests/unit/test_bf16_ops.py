"""Products of bf16 numbers: every operation against float32 on the rounded numbers."""

from dataclasses import replace

import numpy as np
import pytest
from numeric import assert_close, from_bf16, to_bf16
from parity.build import (
    count_valid,
    gradients,
    make_batch,
    make_recipe,
    scatter,
    serial_recipe,
)

from mpipar.engine import Engine
from mpipar.grid import serial_grid
from mpipar.layers.base import Step, nbytes
from mpipar.ops import bf16_obstacle, make_ops
from mpipar.ops.numpy_ops import NumpyOps

# Half a unit in the last of 8 bits, and a little for different rounding before it.
ROUNDING = 2.0**-8 * 1.01


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def ops(request, monkeypatch):
    monkeypatch.setattr("mpipar.ops.team.WORTHWHILE", 0)
    reason = bf16_obstacle("cpu")
    if reason:
        pytest.skip(reason)
    from mpipar.ops.bf16_ops import Bf16Ops

    return Bf16Ops(request.param)


PLAIN = NumpyOps("float32")


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(x):
    return from_bf16(to_bf16(x))


def assert_rounds(bits, exact):
    """`bits` are bf16 and stand for the numbers of `exact`."""
    assert bits.dtype == np.uint16 and bits.shape == exact.shape
    error = np.abs(from_bf16(bits) - exact)
    assert (error <= ROUNDING * np.abs(exact) + 1e-6).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 300, 65)])
def test_operands_are_rounded_once(ops, shape):
    x = draw(*shape)
    bits = ops.operand(x)
    assert np.array_equal(bits, to_bf16(x))
    assert ops.operand(bits) is bits
    kept = np.empty(shape, np.uint16)
    assert ops.operand(x, out=kept) is kept and np.array_equal(kept, bits)
    flat = draw(1000)
    assert np.array_equal(ops.operand(flat), to_bf16(flat))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("t, d, f", [(1, 1, 1), (5, 7, 3), (130, 96, 65)])
def test_dense_products(ops, t, d, f, bias, onto):
    x, w, dy = draw(2, t, d), draw(f, d, seed=1), draw(2, t, f, seed=2)
    b = draw(f, seed=3) if bias else None
    base = draw(2, t, f, seed=4) if onto else None
    x16, w16, dy16 = (ops.operand(a) for a in (x, w, dy))
    y = ops.linear_fwd(x16, w16, b, base)
    expected = rounded(x) @ rounded(w).T
    expected = expected + (b if bias else 0) + (base if onto else 0)
    assert y.dtype == np.float32
    assert_close(y, expected, 1e-5)
    assert_close(ops.linear_dx(dy16, w16), rounded(dy) @ rounded(w), 1e-5)
    dw, db = draw(f, d, seed=5), draw(f, seed=6)
    before = dw.copy(), db.copy()
    ops.linear_dw(dy16, x16, dw)
    ops.linear_db(dy16, db)
    flat_dy, flat_x = rounded(dy).reshape(-1, f), rounded(x).reshape(-1, d)
    assert_close(dw, before[0] + flat_dy.T @ flat_x, 1e-5)
    assert_close(db, before[1] + flat_dy.sum(0), 1e-5)


def test_norms_and_activations_write_operands(ops):
    x, gain, bias = draw(2, 40, 70), draw(70, seed=1), draw(70, seed=2)
    for name, args in (("layernorm_fwd", (x, gain, bias)), ("rmsnorm_fwd", (x, gain))):
        ours = getattr(ops, name)(*args, eps=1e-5)
        exact = getattr(PLAIN, name)(*args, eps=1e-5)
        assert_rounds(ours[0], exact[0])
        for statistic, expected in zip(ours[1:], exact[1:], strict=True):
            assert_close(statistic, expected, 1e-6)
    for tanh in (True, False):
        (y, slope), exact = ops.gelu_fwd(x, tanh=tanh), PLAIN.gelu_fwd(x, tanh=tanh)
        assert_rounds(y, exact[0])
        assert_rounds(slope, exact[1])
        dy = draw(2, 40, 70, seed=3)
        assert_rounds(ops.gelu_dx(dy.copy(), slope), dy * from_bf16(slope))


def test_swiglu_writes_operands(ops):
    u, dy = draw(2, 40, 64), draw(2, 40, 32, seed=1)
    halves = u[..., :32], u[..., 32:]
    assert_rounds(ops.swiglu_fwd(*halves), PLAIN.swiglu_fwd(*halves))
    bits, exact = np.empty(u.shape, np.uint16), np.empty_like(u)
    for kind, du in ((ops, bits), (PLAIN, exact)):
        kind.swiglu_dx(dy, *halves, dgate=du[..., :32], dup=du[..., 32:])
    assert_rounds(bits, exact)


@pytest.mark.parametrize("s", [1, 33, 300])
def test_attention_writes_operands_and_reads_them_back(ops, s):
    fused, do = draw(2, s, 8, 16), draw(2, s, 4, 16, seed=1)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    o, lse = ops.attention_fwd(q, k, v, scale=0.25)
    exact, _ = PLAIN.attention_fwd(q, k, v, scale=0.25)
    assert_rounds(o, exact)
    grads = []
    for kind, out in ((ops, o), (PLAIN, from_bf16(o))):
        d = np.empty_like(fused)
        views = {"dq": d[:, :, :4], "dk": d[:, :, 4:6], "dv": d[:, :, 6:]}
        kind.attention_bwd(do, q, k, v, out, lse, scale=0.25, **views)
        grads.append(d)
    assert_close(grads[0], grads[1], 1e-5)


def test_the_gradient_of_the_loss_is_an_operand(ops):
    logits, seed = draw(30, 65), np.full(30, 1 / 30, np.float32)
    local = np.random.default_rng(0).integers(-5, 70, 30)
    peak = ops.row_max(logits)
    results = []
    for kind in (ops, PLAIN):
        e = logits.copy()
        total, _ = kind.xent_fwd(e, local, peak)
        results.append(kind.xent_dx(e, total, local, seed))
    assert_rounds(*results)


# --- whole models ---------------------------------------------------------------------


def engine_of(family, precision):
    words = [f"model.family={family}", f"train.precision={precision}"]
    recipe = serial_recipe(make_recipe(1, *words))
    engine = Engine(recipe, serial_grid(), make_ops("cpu", precision))
    scatter(engine)
    engine.flat.refresh()
    return engine


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_model_in_bf16_has_nearly_the_loss_and_gradient_of_fp32(ops, family):
    losses, grads = [], []
    for precision in ("bf16", "fp32"):
        engine = engine_of(family, precision)
        batch = make_batch(engine.recipe, 0)
        loss = engine.gradients([batch], count_valid(batch))
        losses.append(loss)
        grads.append(np.concatenate([g.ravel() for g in gradients(engine).values()]))
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert losses[0] != losses[1]
    a, b = (g.astype(np.float64) for g in grads)
    assert a @ b / np.sqrt((a @ a) * (b @ b)) > 0.999
    assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(b), rel=1e-2)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_training_in_bf16_goes_where_fp32_goes(ops, family):
    ends = []
    for precision in ("bf16", "fp32"):
        engine = engine_of(family, precision)
        batch = make_batch(engine.recipe, 0)
        losses = [engine.step([batch], count_valid(batch)).loss for _ in range(25)]
        assert losses[-1] < 0.9 * losses[0]
        assert np.array_equal(engine.flat.operand, engine.ops.operand(engine.flat.data))
        ends.append(losses[-1])
    assert ends[0] == pytest.approx(ends[1], rel=2e-2)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_what_layers_save_is_what_they_say(ops, family):
    engine = engine_of(family, "bf16")
    batch = make_batch(engine.recipe, 0)
    step = Step(np.arange(16), batch.samples, batch.labels, count_valid(batch))
    x = batch.tokens
    for unit in engine.model.units:
        x, saved = unit.forward(x, step)
        assert nbytes(saved) == unit.cost(*batch.tokens.shape).saved


def test_bf16_memory_is_counted(ops):
    from mpipar.train.metrics import memory

    engine = engine_of("gpt", "bf16")
    assert memory(engine)["params"] == engine.flat.size * 6
    assert memory(engine_of("gpt", "fp32"))["params"] == engine.flat.size * 4


def test_updates_too_small_for_bf16_are_not_lost(ops):
    """A16: a hundred steps of 0.001 from 1, each less than half a bf16 step."""
    engine = engine_of("gpt", "bf16")
    gain = next(p for p in engine.flat.parameters if p.name.endswith("norm1.gain"))
    gain.data[...] = 1.0
    engine.optimizer.hyper = replace(engine.optimizer.hyper, clip=0.0, eps=1e-30)
    for _ in range(100):
        engine.flat.grad[...] = 1.0
        assert engine.optimizer.update(1e-3, 1.0)
        engine.state.values.changed()
    assert np.abs(gain.data - 0.9).max() < 2e-3
    assert np.array_equal(engine.flat.operand, engine.ops.operand(engine.flat.data))
