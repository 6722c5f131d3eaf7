"""Results of products as operands: rows of odd lengths, what layers keep of them."""

import numpy as np
import pytest
from gpu.shim.compile import GXX
from gpu.test_kernels import on_cpu
from gpu.test_products import EXACT, NARROW, WIDE, Drawn, check, double
from layer_cases import BATCH, CASES, Made, upstream
from numeric import assert_close

from mpipar.comm import NullCommunicator
from mpipar.layers.base import nbytes

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")


@pytest.mark.parametrize("grads", ["float32", "operand"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_long_odd_rows_are_split(precision, grads, monkeypatch):
    for room in ("arrays", "products"):
        monkeypatch.setattr(f"mpipar.ops.cuda.{room}.LONG", 24)
    draw, ops, f = Drawn(precision), on_cpu(precision), 29
    x, w, b = draw(2, 9, 16), draw(f, 16), draw(f)
    y = EXACT.linear_fwd(double(x), double(w), double(b))
    z = ops.linear_fwd(x, w, b, narrow=True)
    check(z, y, NARROW[precision], draw.operand)
    check(ops.linear_fwd(x, w, b), y, WIDE[precision], draw.dtype)
    dx = EXACT.linear_dx(double(z), double(w))
    check(ops.linear_dx(z, w), dx, 2 * WIDE[precision], draw.dtype)
    dw = draw(f, 16, wide=grads == "float32")
    expected = double(dw)
    EXACT.linear_dw(double(z), double(x), expected)
    ops.linear_dw(z, x, dw)
    rounding = WIDE if grads == "float32" else NARROW
    check(dw, expected, 2 * rounding[precision], dw.dtype)
    is_split = precision != "fp32"
    assert ops.products.calls == (8 if is_split else 4)
    assert z.strides[1] // z.itemsize == (32 if is_split else f)
    steps = {p.step_d for p in ops.products.plans if p.result == draw.operand.name}
    assert not is_split or not any(step % 8 for step in steps)


def test_the_loss_of_an_odd_vocabulary_reads_rows_where_they_lie(monkeypatch):
    for room in ("arrays", "products"):
        monkeypatch.setattr(f"mpipar.ops.cuda.{room}.LONG", 24)
    draw, results = Drawn("bf16"), []
    x, w, local = draw(9, 16), draw(29, 16), np.arange(9) * 3
    seed = np.full(9, 0.25, np.float32)
    ops = on_cpu("bf16")
    padded = ops.linear_fwd(x, w, narrow=True)
    for logits in (padded, padded.copy(order="C")):
        peak, total, target = ops.xent_fwd(logits, local, lambda own: own)
        dz = ops.xent_dx(logits, peak, total, local, seed)
        results.append((peak, total, target, dz))
    for ours, expected in zip(*results, strict=True):
        assert_close(double(ours), double(expected), NARROW["bf16"])
    assert np.shares_memory(results[0][-1], padded)
    logits = draw(9, 29, wide=True)
    dz = ops.xent_dx(logits, *results[0][:2], local, seed)
    assert dz.strides[0] == 2 * 32


KEEPING = ("GeluMlp tanh", "GeluMlp erf", "SwigluMlp", "Head", "attention")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in KEEPING], ids=str)
def test_layers_keep_what_they_state(case):
    made = Made(case, NullCommunicator("tp"), 5, ops=on_cpu("bf16"))
    x = made.x() if case.enters == "ids" else made.x().astype(np.float32)
    y, saved = made.layer.forward(x, made.step)
    cost = made.layer.cost(BATCH, 5)
    assert case.holds(nbytes(saved), cost.saved)
    dy = None if upstream(y) is None else upstream(y).astype(np.float32)
    _, left = made.layer.backward_input(dy, saved)
    del saved, y
    assert case.holds(nbytes(left), cost.left)
