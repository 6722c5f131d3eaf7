"""Mixed precision: every operation against float32 on the rounded numbers."""

import numpy as np
import pytest
from numeric import assert_close, from_half, to_half

from mpipar.ops import Ops, bf16_obstacle
from mpipar.ops.half_ops import HalfOps
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.spans import causal_spans

# Half a unit in the last of 8 or 11 bits, and a little for other rounding before it.
ROUNDING = {"bf16": 2.0**-8 * 1.01, "fp16": 2.0**-11 * 1.01}
# Where products are made, type, threads
KINDS = [
    *(("oneDNN", "bf16", threads) for threads in (1, 2)),
    *(("float32", half, threads) for half in ROUNDING for threads in (1, 2)),
    *(("reference", half, 1) for half in ROUNDING),
]
PLAIN = NumpyOps("float32")


@pytest.fixture(params=KINDS, ids=lambda kind: " ".join(map(str, kind)))
def ops(request, monkeypatch):
    monkeypatch.setattr("mpipar.ops.team.WORTHWHILE", 0)
    monkeypatch.setattr("mpipar.ops.half_ops.WIDE", 32)
    way, half, threads = request.param
    if way == "reference":
        return Ops(dtype="float32", half=half)
    if way == "float32":
        return HalfOps(half, threads)
    if reason := bf16_obstacle():
        pytest.skip(reason)
    from mpipar.ops.bf16_ops import Bf16Ops

    return Bf16Ops(threads)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(ops, x):
    return from_half(to_half(x, ops.precision))


def assert_rounds(ops, bits, exact):
    """`bits` are 16-bit and stand for the numbers of `exact`."""
    assert bits.dtype == ops.operand_dtype and bits.shape == exact.shape
    error = np.abs(from_half(bits) - exact)
    assert (error <= ROUNDING[ops.precision] * np.abs(exact) + 1e-6).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 300, 65)])
def test_operands_are_rounded_once(ops, shape):
    x = draw(*shape)
    bits = ops.operand(x)
    assert np.array_equal(bits, to_half(x, ops.precision))
    assert ops.operand(bits) is bits
    kept = ops.empty_operand(shape)
    assert ops.operand(x, out=kept) is kept and np.array_equal(kept, bits)
    flat = draw(1000)
    assert np.array_equal(ops.operand(flat), to_half(flat, ops.precision))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("t, d, f", [(1, 1, 1), (5, 7, 3), (130, 96, 65)])
def test_dense_products(ops, t, d, f, bias, onto):
    x, w, dy = draw(2, t, d), draw(f, d, seed=1), draw(2, t, f, seed=2)
    b = draw(f, seed=3) if bias else None
    base = draw(2, t, f, seed=4) if onto else None
    x16, w16, dy16 = (ops.operand(a) for a in (x, w, dy))
    y = ops.linear_fwd(x16, w16, b, base)
    expected = rounded(ops, x) @ rounded(ops, w).T
    expected = expected + (b if bias else 0) + (base if onto else 0)
    assert y.dtype == np.float32
    assert_close(y, expected, 1e-5)
    assert np.array_equal(
        ops.linear_fwd(x16, w16, b, base, narrow=True), to_half(y, ops.precision)
    )
    dx = ops.linear_dx(dy16, w16)
    assert_close(dx, rounded(ops, dy) @ rounded(ops, w), 1e-5)
    narrow = ops.linear_dx(dy16, w16, narrow=True)
    assert np.array_equal(narrow, to_half(dx, ops.precision))
    dw, db = draw(f, d, seed=5), draw(f, seed=6)
    before = dw.copy(), db.copy()
    ops.linear_dw(dy16, x16, dw)
    ops.linear_db(dy16, db)
    flat_dy, flat_x = rounded(ops, dy).reshape(-1, f), rounded(ops, x).reshape(-1, d)
    assert_close(dw, before[0] + flat_dy.T @ flat_x, 1e-5)
    assert_close(db, before[1] + flat_dy.sum(0), 1e-5)


def test_norms_and_activations_write_operands(ops):
    x, gain, bias = draw(2, 40, 70), draw(70, seed=1), draw(70, seed=2)
    for name, args in (("layernorm_fwd", (x, gain, bias)), ("rmsnorm_fwd", (x, gain))):
        ours = getattr(ops, name)(*args, eps=1e-5)
        exact = getattr(PLAIN, name)(*args, eps=1e-5)
        assert_rounds(ops, ours[0], exact[0])
        for statistic, expected in zip(ours[1:], exact[1:], strict=True):
            assert_close(statistic, expected, 1e-6)
    for tanh in (True, False):
        (y, slope), exact = ops.gelu_fwd(x, tanh=tanh), PLAIN.gelu_fwd(x, tanh=tanh)
        assert_rounds(ops, y, exact[0])
        assert_rounds(ops, slope, exact[1])
        dy = draw(2, 40, 70, seed=3)
        assert_rounds(ops, ops.gelu_dx(dy.copy(), slope), dy * from_half(slope))


def test_swiglu_writes_operands(ops):
    u, dy = draw(2, 40, 64), draw(2, 40, 32, seed=1)
    halves = u[..., :32], u[..., 32:]
    assert_rounds(ops, ops.swiglu_fwd(*halves), PLAIN.swiglu_fwd(*halves))
    bits, exact = ops.empty_operand(u.shape), np.empty_like(u)
    for kind, du in ((ops, bits), (PLAIN, exact)):
        kind.swiglu_dx(dy, *halves, dgate=du[..., :32], dup=du[..., 32:])
    assert_rounds(ops, bits, exact)


@pytest.mark.parametrize("s", [1, 33, 300])
def test_attention_writes_operands_and_reads_them_back(ops, s):
    fused, do = draw(2, s, 8, 16), draw(2, s, 4, 16, seed=1)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    options = {"scale": 0.25, "spans": causal_spans(s)}
    o, lse = ops.attention_fwd(q, k, v, **options)
    exact, _ = PLAIN.attention_fwd(q, k, v, **options)
    assert_rounds(ops, o, exact)
    part, level = ops.attention_fwd(q, k, v, **options, part=True)
    assert part.dtype == np.float32 and np.array_equal(level, lse)
    assert_close(part, exact, 1e-5)
    grads = []
    for kind, out in ((ops, o), (PLAIN, from_half(o))):
        d = np.zeros_like(fused)
        views = {"dq": d[:, :, :4], "dk": d[:, :, 4:6], "dv": d[:, :, 6:]}
        kind.attention_bwd(do, q, k, v, out, lse, **options, **views)
        grads.append(d)
    assert_close(grads[0], grads[1], 1e-5)


def test_the_gradient_of_the_loss_is_an_operand(ops):
    logits, seed = draw(30, 65), np.full(30, 1 / 30, np.float32)
    local = np.random.default_rng(0).integers(-5, 70, 30)
    results = []
    for kind in (ops, PLAIN):
        e = logits.copy()
        peak, total, _ = kind.xent_fwd(e, local, lambda own: own)
        results.append(kind.xent_dx(e, peak, total, local, seed))
    assert_rounds(ops, *results)


# --- weights and gradients in 16 bits -------------------------------------------------


def assert_added(ops, bits, before, added):
    """`bits` is the sum of two numbers, rounded once."""
    exact = from_half(before) + added
    assert bits.dtype == before.dtype
    slack = 1e-5 * max(1.0, np.abs(exact).max())
    error = np.abs(from_half(bits) - exact)
    assert (error <= ROUNDING[ops.precision] * np.abs(exact) + slack).all()


@pytest.mark.parametrize("t, d, f", [(1, 1, 1), (5, 7, 3), (700, 96, 65)])
def test_gradients_of_dense_weights_are_rounded_once(ops, t, d, f):
    x, dy = draw(2, t, d), draw(2, t, f, seed=2)
    x16, dy16 = ops.operand(x), ops.operand(dy)
    dw, db = ops.operand(draw(f, d, seed=5)), ops.operand(draw(f, seed=6))
    before = dw.copy(), db.copy()
    ops.linear_dw(dy16, x16, dw)
    ops.linear_db(dy16, db)
    flat_dy, flat_x = rounded(ops, dy).reshape(-1, f), rounded(ops, x).reshape(-1, d)
    assert_added(ops, dw, before[0], flat_dy.T @ flat_x)
    assert_added(ops, db, before[1], flat_dy.sum(0))


def test_a_bias_may_be_an_operand(ops):
    x, w, b, base = draw(4, 6), draw(40, 6, seed=1), draw(40, seed=2), draw(4, 40)
    x16, w16, b16 = (ops.operand(a) for a in (x, w, b))
    exact = rounded(ops, x) @ rounded(ops, w).T + rounded(ops, b)
    assert_close(ops.linear_fwd(x16, w16, b16), exact, 1e-5)
    assert_close(ops.linear_fwd(x16, w16, b16, base), exact + base, 1e-5)
    for onto in (None, base):
        y = draw(4, 40, seed=3)
        right = PLAIN.add_residual(y.copy(), rounded(ops, b), onto)
        assert_close(ops.add_residual(y, b16, onto), right, 1e-6)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_with_16_bit_gains(ops, kind):
    x, dy = draw(2, 300, 70), draw(2, 300, 70, seed=1)
    names = ["gain", "bias"] if kind == "layernorm" else ["gain"]
    weights = [ops.operand(draw(70, seed=2 + i)) for i in range(len(names))]
    exact = [from_half(w) for w in weights]
    ours = getattr(ops, f"{kind}_fwd")(x, *weights, eps=1e-5)
    plain = getattr(PLAIN, f"{kind}_fwd")(x, *exact, eps=1e-5)
    assert_rounds(ops, ours[0], plain[0])
    grads = [ops.operand(draw(70, seed=5 + i)) for i in range(len(names))]
    before = [g.copy() for g in grads]
    sums = [np.zeros(70, np.float32) for _ in names]
    back = f"{kind}_bwd"
    keys = [f"d{name}" for name in names]
    dx = getattr(ops, back)(
        dy, x, *ours[1:], weights[0], **dict(zip(keys, grads, strict=True)), onto=x
    )
    right = getattr(PLAIN, back)(
        dy, x, *plain[1:], exact[0], **dict(zip(keys, sums, strict=True)), onto=x
    )
    assert_close(dx, right, 1e-5)
    for got, old, added in zip(grads, before, sums, strict=True):
        assert_added(ops, got, old, added)


def test_embeddings_in_16_bits(ops):
    table, rng = ops.operand(draw(10, 6)), np.random.default_rng(1)
    ids = rng.integers(0, 12, (2, 50))
    x = ops.embedding_fwd(ids, table, first=1)
    assert x.dtype == np.float32
    assert np.array_equal(x, PLAIN.embedding_fwd(ids, from_half(table), first=1))
    dy, grad = draw(2, 50, 6, seed=2), ops.operand(draw(10, 6, seed=3))
    before, sums = grad.copy(), np.zeros((10, 6), np.float32)
    ops.embedding_dw(dy, ids, grad, first=1)
    PLAIN.embedding_dw(dy, ids, sums, first=1)
    assert_added(ops, grad, before, sums)


def test_rows_to_experts_and_back(ops):
    dy, rows = ops.operand(draw(20, 6)), draw(40, 6, seed=1)
    exact, gates = from_half(dy), draw(20, 2, seed=2)
    tokens, slots = (x.reshape(-1) for x in np.indices((20, 2)))
    moved = ops.gather_rows(dy, tokens)
    assert np.array_equal(moved, dy[tokens])
    assert np.array_equal(ops.gather_rows(rows, tokens), rows[tokens])
    out, right = np.ones((2, 20, 6), np.float32)
    ops.combine_rows(rows, np.arange(40).reshape(20, 2), gates, out=out)
    PLAIN.combine_rows(rows, np.arange(40).reshape(20, 2), gates, out=right)
    assert_close(out, right, 1e-6)
    dgates, right = np.zeros((2, 20, 2), np.float32)
    dx = ops.combine_rows_bwd(dy, rows, tokens, slots, gates, dgates=dgates)
    plain = PLAIN.combine_rows_bwd(exact, rows, tokens, slots, gates, dgates=right)
    assert_rounds(ops, dx, plain)
    assert_close(dgates, right, 1e-5)


def test_rows_of_a_token_are_added_up_before_they_are_rounded(ops):
    """A19's kind: 256 and eight times 1 for the same token."""
    dy = np.array([[256.0], *[[1.0]] * 8], np.float32)[None]
    grad = ops.operand(np.zeros((3, 1), np.float32))
    ops.embedding_dw(dy, np.full((1, 9), 2), grad)
    assert from_half(grad).ravel().tolist() == [0, 0, 264]


def test_positions_in_16_bits(ops):
    table, rows = ops.operand(draw(8, 6)), np.array([5, 2, 7])
    x = draw(2, 3, 6, seed=1)
    right = x + from_half(table)[rows]
    ops.add_positions(x, table, rows)
    assert np.array_equal(x, right)
    grad = ops.operand(draw(8, 6, seed=2))
    before, sums = grad.copy(), np.zeros((8, 6), np.float32)
    sums[rows] = x.sum(0)
    ops.positions_dw(x, rows, grad)
    assert_added(ops, grad, before, sums)


@pytest.mark.parametrize("size", [1, 7, 70_000])
def test_the_optimizer_reads_16_bit_gradients(ops, size):
    grad = ops.operand(draw(size))
    exact = from_half(grad)
    assert ops.square_sum(grad) == pytest.approx(PLAIN.square_sum(exact), rel=1e-12)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}
    results = []
    for kind, g in ((ops, grad), (PLAIN, exact)):
        arrays = [draw(size, seed=1), g, draw(size, seed=2), np.abs(draw(size, seed=3))]
        kind.adamw(*arrays, **numbers, step=3, scale=0.5)
        results.append((arrays[0], *arrays[2:]))
    for ours, right in zip(*results, strict=True):
        assert_close(ours, right, 1e-6)


def test_what_fp16_cannot_hold_is_infinite():
    ops = HalfOps("fp16")
    bits = ops.operand(np.array([[7e4, -7e4, 65504.0, 1e-9, np.nan]], np.float32))
    right = [[np.inf, -np.inf, 65504.0, 0.0, np.nan]]
    assert np.array_equal(bits, np.array(right, np.float16), equal_nan=True)


def test_starting_weights_and_loaded_ones_are_rounded(ops):
    bits, exact = ops.empty_operand((6, 5)), np.empty((6, 5), np.float32)
    box = ((0, 6), (0, 5))
    for kind, out in ((ops, bits), (PLAIN, exact)):
        kind.fill_normal(out, std=0.1, seed=1, name="w", shape=(6, 5), box=box)
    assert_rounds(ops, bits, exact)
