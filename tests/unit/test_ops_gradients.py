"""Array operations: backward against finite differences, and known values."""

import math

import numpy as np
import pytest
from numeric import Draw, assert_close, numeric_gradient

from mpipar.ops.base import Ops
from mpipar.ops.numpy_ops import NumpyOps

ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1, "scale": 0.5}
OPS = [Ops(dtype="float64"), NumpyOps("float64")]
both_ops = pytest.mark.parametrize("ops", OPS, ids=lambda o: type(o).__name__)


def check(gradient, forward, x, dy):
    """gradient is that of Σ dy·forward() by x."""
    expected = numeric_gradient(lambda: float((forward() * dy).sum()), x)
    assert_close(gradient, expected, 1e-6)


@pytest.fixture
def draw():
    return Draw(np.dtype("float64"), (2, 3, 5))


@both_ops
def test_linear_gradients(ops, draw):
    x, w, b, dy = draw.rows(), draw(4, 5), draw(4), draw.rows(4)
    dw, db = np.zeros_like(w), np.zeros_like(b)
    ops.linear_dw(dy, x, dw)
    ops.linear_db(dy, db)
    for gradient, by in ((ops.linear_dx(dy, w), x), (dw, w), (db, b)):
        check(gradient, lambda: ops.linear_fwd(x, w, b), by, dy)


@both_ops
@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_gradient(ops, draw, tanh):
    x, dy = 2 * draw.rows(), draw.rows()
    dx = ops.gelu_dx(dy.copy(), ops.gelu_fwd(x, tanh=tanh)[1])
    check(dx, lambda: ops.gelu_fwd(x, tanh=tanh)[0], x, dy)


@both_ops
def test_swiglu_gradients(ops, draw):
    (gate, up), (dgate, dup), dy = draw.halves(), draw.halves(), draw.rows()
    ops.swiglu_dx(dy, gate, up, dgate=dgate, dup=dup)
    for gradient, by in ((dgate, gate), (dup, up)):
        check(gradient, lambda: ops.swiglu_fwd(gate, up), by, dy)


@both_ops
def test_layernorm_gradients(ops, draw):
    x, gain, bias, dy = draw.rows(), draw(5), draw(5), draw.rows()

    def forward():
        return ops.layernorm_fwd(x, gain, bias, eps=1e-3)

    dgain, dbias = np.zeros(5), np.zeros(5)
    stats = forward()[1:]
    dx = ops.layernorm_bwd(dy, x, *stats, gain, dgain=dgain, dbias=dbias)
    for gradient, by in ((dx, x), (dgain, gain), (dbias, bias)):
        check(gradient, lambda: forward()[0], by, dy)


@both_ops
def test_rmsnorm_gradients(ops, draw):
    x, gain, dy, dgain = draw.rows(), draw(5), draw.rows(), np.zeros(5)
    rstd = ops.rmsnorm_fwd(x, gain, eps=1e-3)[1]
    dx = ops.rmsnorm_bwd(dy, x, rstd, gain, dgain=dgain)
    for gradient, by in ((dx, x), (dgain, gain)):
        check(gradient, lambda: ops.rmsnorm_fwd(x, gain, eps=1e-3)[0], by, dy)


@both_ops
def test_rope_gradient_is_the_inverse_rotation(ops, draw):
    x, dy = draw(2, 3, 2, 4), draw(2, 3, 2, 4)
    table = ops.rope_table(np.array([0, 3, 11]), 4, 100.0)

    def rotated(y, **options):
        y = y.copy()
        ops.rope(y, *table, **options)
        return y

    check(rotated(dy, inverse=True), lambda: rotated(x), x, dy)
    assert_close(rotated(rotated(x), inverse=True), x, 1e-14)


@both_ops
def test_embedding_gradient(ops, draw):
    ids, table, dy = draw.ids(2, 9), draw(5, 5), draw.rows()
    dtable = np.zeros_like(table)
    ops.embedding_dw(dy, ids, dtable, first=3)
    check(dtable, lambda: ops.embedding_fwd(ids, table, first=3), table, dy)


@both_ops
def test_cross_entropy_gradient(ops, draw):
    logits, local, seed = draw(5, 4), np.array([0, 3, 3, -2, 7]), draw(5)
    e, higher = logits.copy(), logits.max(-1) + 1
    peak, total, _ = ops.xent_fwd(e, local, lambda own: own + 1)
    dlogits = ops.xent_dx(e, peak, total, local, seed)
    assert dlogits is e and np.array_equal(peak, higher)

    def losses():
        _, total, target = ops.xent_fwd(logits.copy(), local, lambda _: higher)
        return np.log(total) - target

    check(dlogits, losses, logits, seed)


# --- values ---------------------------------------------------------------------------


@both_ops
def test_erf_is_that_of_the_c_library(ops):
    x = np.concatenate([np.linspace(-7, 7, 4001), np.linspace(2.49, 2.51, 201)])
    assert np.abs(ops.erf(x) - [math.erf(t) for t in x]).max() <= 2e-15


@pytest.mark.parametrize(
    "ops", [*OPS, NumpyOps("float32")], ids=["Ops", "NumpyOps", "NumpyOps float32"]
)
def test_large_inputs_stay_finite_without_warning(ops):
    x = np.array([[-500, -100, -89, -30, 0, 30, 89, 100, 500]], ops.dtype)
    positive, ones = np.maximum(x, 0), np.ones_like(x)
    for tanh in (True, False):
        y, slope = ops.gelu_fwd(x, tanh=tanh)
        assert_close(y, positive, 1e-6)
        assert_close(slope, np.where(x == 0, 0.5, x > 0), 1e-6)
    assert_close(ops.swiglu_fwd(x, ones), positive, 1e-6)
    dgate, dup = np.empty_like(x), np.empty_like(x)
    ops.swiglu_dx(ones, x, ones, dgate=dgate, dup=dup)
    assert_close(dgate, np.where(x == 0, 0.5, x > 0), 1e-6)
    assert_close(dup, positive, 1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("lead", [0.0, 3.0])
def test_cross_entropy_with_a_peak_of_its_own_or_from_elsewhere(dtype, lead):
    ops = NumpyOps(dtype)
    logits = np.array([[500, -500, 0, 499], [-500] * 4, [1, 2, 3, 4]], dtype)
    exact = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    local, e = np.array([3, 0, 9]), logits.copy()
    peak, total, target = ops.xent_fwd(e, local, lambda own: own + ops.dtype.type(lead))
    assert_close(target - np.log(total), [*exact[[0, 1], local[:2]],
                 -np.log(np.exp(np.array([1, 2, 3, 4]) - 4 - lead).sum())], 1e-6)
    dlogits = ops.xent_dx(e, peak, total, local, np.ones(3, dtype))
    expected = np.exp(exact)
    expected[[0, 1], local[:2]] -= 1
    assert_close(dlogits, expected, 1e-6)


@both_ops
def test_rope_turns_the_halves_of_a_head(ops):
    x = np.tile([1.0, 0, 0, 0], (1, 2, 1, 1))
    ops.rope(x, *ops.rope_table(np.array([0, 1]), 4, 10_000.0))
    assert np.array_equal(x[0, 0, 0], [1, 0, 0, 0])
    assert_close(x[0, 1, 0], [math.cos(1), 0, math.sin(1), 0], 1e-15)


@both_ops
def test_repeated_ids_add_up_in_the_embedding(ops, draw):
    ids = np.array([[4, 4, 6], [4, 0, 99]])
    dy, dtable = draw.rows(), np.ones((3, 5))
    ops.embedding_dw(dy, ids, dtable, first=4)
    expected = np.ones((3, 5))
    expected[0] += dy[0, 0] + dy[0, 1] + dy[1, 0]
    expected[2] += dy[0, 2]
    assert_close(dtable, expected, 1e-14)


@both_ops
def test_adamw_follows_its_formula_for_several_steps(ops, draw):
    weight, m, v = draw(50), np.zeros(50), np.zeros(50)
    w, first, second = weight.copy(), np.zeros(50), np.zeros(50)
    for step in range(1, 6):
        grad = draw(50)
        ops.adamw(weight, grad, m, v, step=step, **ADAM)
        g = 0.5 * grad
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
        hat = first / (1 - 0.9**step), second / (1 - 0.95**step)
        w = w - 0.1 * (hat[0] / (np.sqrt(hat[1]) + 1e-8) + 0.1 * w)
        assert_close(weight, w, 1e-13)


def test_square_sum_is_exact_beyond_float32():
    x = np.full(200_001, 3.0, "float32")
    x[-1] = 4096.0
    assert NumpyOps("float32").square_sum(x) == 9.0 * 200_000 + 4096.0**2
    assert NumpyOps("float32").square_sum(x[:0]) == 0.0
