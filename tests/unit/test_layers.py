"""Every layer on one rank: gradients, the split backward pass, memory and aliasing."""

import numpy as np
import pytest
from layer_cases import BATCH, CASES, Made, arrays, upstream
from numeric import assert_close, numeric_gradient

from mpipar.comm.null import NullCommunicator
from mpipar.layers.base import nbytes

S = 5
every = pytest.mark.parametrize("case", CASES, ids=str)


def make(case, s=S):
    return Made(case, NullCommunicator("tp"), s)


def run(made, number=0):
    """Fused forward and backward of one micro-batch."""
    y, saved = made.layer.forward(made.x(number), made.step)
    return y, made.layer.backward(upstream(y, number), saved)


@pytest.mark.parametrize("s", [1, S])
@pytest.mark.parametrize("case", [c for c in CASES if not c.is_model], ids=str)
def test_gradients_are_finite_differences(case, s):
    made = make(case, s)
    x, (dx, value) = made.x(), differentiate(made)
    if case.enters == "ids":
        assert dx is None
    else:
        close(dx, numeric_gradient(lambda: value(x), x), "dx")
    for p in made.flat.parameters:
        close(p.grad, numeric_gradient(lambda: value(x), p.data), p.name)


@pytest.mark.parametrize("case", [c for c in CASES if c.is_model], ids=str)
def test_slopes_of_whole_models_are_finite_differences(case):
    made = make(case)
    (_, value), rng = differentiate(made), np.random.default_rng(0)
    for p in made.flat.parameters:
        kept, way = p.data.copy(), rng.standard_normal(p.data.shape)
        along = np.zeros(1)

        def shifted(p=p, kept=kept, way=way, along=along):
            p.data[...] = kept + along[0] * way
            return value(made.x())

        close((p.grad * way).sum(), numeric_gradient(shifted, along), p.name)
        p.data[...] = kept


def differentiate(made):
    """dx, with weight gradients added, and the function of x that it belongs to."""
    y, saved = made.layer.forward(made.x(), made.step)
    dy = upstream(y)

    def value(x):
        y, _ = made.layer.forward(x.copy(), made.step)
        return y / made.step.valid if dy is None else float((y * dy).sum())

    return made.layer.backward(dy, saved), value


def close(gradient, expected, what):
    """Within 1e-6, where the rounding of the differences allows it."""
    scale = max(1e-3, np.abs(expected).max())
    assert_close(np.append(gradient, scale), np.append(expected, scale), 1e-6, what)


@every
def test_backward_is_its_two_halves_bit_for_bit(case):
    fused, split = make(case), make(case)
    y, dx = run(fused)
    again, saved = split.layer.forward(split.x(), split.step)
    half, left = split.layer.backward_input(upstream(again), saved)
    split.layer.backward_weight(left)
    assert np.array_equal(y, again) and np.array_equal(dx, half)
    assert np.array_equal(fused.flat.grad, split.flat.grad)


@every
def test_gradients_of_micro_batches_add_up(case):
    both, grads = make(case), []
    for number in range(2):
        run(both, number)
        alone = make(case)
        run(alone, number)
        grads.append(alone.flat.grad)
    if grads[0].size:
        assert_close(both.flat.grad, grads[0] + grads[1], 1e-13)


@every
def test_deferred_weight_gradients_in_order_are_the_fused_ones_bit_for_bit(case):
    fused, late = make(case), make(case)
    expected = [run(fused, number)[1] for number in range(3)]
    # All forwards, all input gradients, then all weight gradients.
    forwards = [late.layer.forward(late.x(i), late.step) for i in range(3)]
    halves = [
        late.layer.backward_input(upstream(y, i), saved)
        for i, (y, saved) in enumerate(forwards)
    ]
    for (dx, left), other in zip(halves, expected, strict=True):
        assert np.array_equal(dx, other)
        late.layer.backward_weight(left)
    assert np.array_equal(fused.flat.grad, late.flat.grad)


@every
@pytest.mark.parametrize("s", [1, S])
def test_saved_bytes_are_the_stated_ones(case, s):
    made = make(case, s)
    y, saved = made.layer.forward(made.x(), made.step)
    cost = made.layer.cost(BATCH, s)
    assert case.holds(nbytes(saved), cost.saved)
    _, left = made.layer.backward_input(upstream(y), saved)
    del saved, y
    assert case.holds(nbytes(left), cost.left)
    assert not made.flat.grad.any()


@every
def test_one_rank_sends_nothing(case):
    cost = make(case).layer.cost(BATCH, S)
    assert not cost.calls and not cost.moved


@every
def test_inputs_and_parameters_are_left_intact(case):
    made = make(case)
    x, weights = made.x(), made.flat.data.copy()
    y, saved = made.layer.forward(x, made.step)
    dy = upstream(y)
    made.layer.backward(dy, saved)
    if case.name != "VocabLoss":
        assert np.array_equal(x, made.x())
    if dy is not None:
        assert np.array_equal(dy, upstream(y))
    assert np.array_equal(made.flat.data, weights)


@every
def test_what_is_returned_may_be_overwritten(case):
    fused, made = make(case), make(case)
    _, expected = run(fused)
    x = made.x()
    y, saved = made.layer.forward(x, made.step)
    dy = upstream(y)
    assert not any(np.shares_memory(a, y) for a in (x, *arrays(saved)))
    if dy is not None:
        y.fill(np.nan)
    dx, left = made.layer.backward_input(dy, saved)
    assert np.array_equal(dx, expected)
    if dx is not None:
        assert dy is None or not np.shares_memory(dx, dy)
        dx.fill(np.nan)
    made.layer.backward_weight(left)
    assert np.array_equal(made.flat.grad, fused.flat.grad)


@every
def test_a_forward_pass_keeps_nothing_in_the_layer(case):
    """Micro-batches may be in flight together, and end in another order."""
    made, alone = make(case), make(case)
    expected = [run(alone, number)[1] for number in (1, 0)]
    forwards = [made.layer.forward(made.x(i), made.step) for i in range(2)]
    for i, dx in zip((1, 0), expected, strict=True):
        y, saved = forwards[i]
        assert np.array_equal(made.layer.backward(upstream(y, i), saved), dx)
    assert np.array_equal(made.flat.grad, alone.flat.grad)
