"""The comparison behind `mpipar verify`: relative errors, the verdict and its JSON."""

import json

import numpy as np
import pytest

from mpipar.verify.compare import Comparison, relative, tensor_errors
from mpipar.verify.run import Verdict

NAN, INF = float("nan"), float("inf")
K_WEIGHT, K_BIAS = "blocks.0.attention.k.weight", "blocks.0.attention.k.bias"


def layer(bias: float = 0.0) -> dict[str, np.ndarray]:
    """Gradients of one attention layer, whose key bias is zero but for rounding."""
    return {
        "blocks.0.norm1.gain": np.full(4, 1e-6),
        "blocks.0.attention.q.weight": np.full((4, 4), 0.5),
        K_WEIGHT: np.full((4, 4), 0.5),
        K_BIAS: np.full(4, bias),
    }


def errors(tensors, exact):
    return dict(tensor_errors(tensors, exact))


# Errors of single numbers and tensors


def test_equal_tensors_have_no_error():
    assert errors(layer(), layer()) == dict.fromkeys(layer(), 0.0)


def test_an_error_is_relative_to_the_exact_norm():
    changed = layer()
    changed[K_WEIGHT] = changed[K_WEIGHT] * 1.01
    found = errors(changed, layer())
    assert found.pop(K_WEIGHT) == pytest.approx(0.01, rel=1e-12)
    assert set(found.values()) == {0.0}


def test_tensors_are_named_in_the_order_of_the_exact_ones():
    reordered = dict(reversed(layer().items()))
    assert list(errors(reordered, layer())) == list(layer())


@pytest.mark.parametrize("noise", [0.0, 1e-17, 1e-12])
def test_a_tensor_of_rounding_is_judged_by_its_layer(noise):
    """Its own norm would make any difference as large as the tensor."""
    found = errors(layer(bias=-noise), layer(bias=noise))
    scale = np.sqrt(2 * 16 * 0.25)
    assert found[K_BIAS] == pytest.approx(2 * noise * 2 / scale, rel=1e-6)


def test_a_real_gradient_where_none_belongs_is_found():
    assert errors(layer(bias=1e-3), layer(bias=1e-17))[K_BIAS] > 1e-4


def test_a_small_tensor_is_judged_by_itself():
    """Small is not zero: the norm's gain is a layer of its own, the bias is 1e-6."""
    changed = layer(bias=1.1e-6)
    changed["blocks.0.norm1.gain"] = changed["blocks.0.norm1.gain"] * 1.1
    found = errors(changed, layer(bias=1e-6))
    assert found[K_BIAS] == pytest.approx(0.1)
    assert found["blocks.0.norm1.gain"] == pytest.approx(0.1)


def test_a_layer_of_zeros_is_judged_by_plain_difference():
    exact = {"head.weight": np.zeros(3)}
    assert errors({"head.weight": np.zeros(3)}, exact) == {"head.weight": 0.0}
    assert errors({"head.weight": np.array([0, 0, 2.0])}, exact) == {"head.weight": 2.0}


@pytest.mark.parametrize("wrong", [None, np.zeros((4, 3)), np.zeros(16)])
def test_a_missing_or_misshapen_tensor_is_infinitely_wrong(wrong):
    tensors = layer() | {K_WEIGHT: wrong}
    if wrong is None:
        del tensors[K_WEIGHT]
    assert errors(tensors, layer())[K_WEIGHT] == INF


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_no_number_is_an_error(value):
    changed = layer()
    changed[K_WEIGHT] = changed[K_WEIGHT].copy()
    changed[K_WEIGHT][1, 2] = value
    with np.errstate(invalid="ignore"):
        assert not errors(changed, layer())[K_WEIGHT] <= 1e300
        assert not errors(layer(), changed)[K_WEIGHT] <= 1e300


def test_the_error_of_a_number_is_relative_unless_it_should_be_0():
    assert relative(1.5, 1.0) == 0.5
    assert relative(-3.0, -2.0) == 0.5
    assert relative(0.25, 0.0) == 0.25
    assert np.isnan(relative(NAN, 1.0))


# All errors of a kind


def test_the_largest_error_of_a_tensor_stands():
    comparison = Comparison()
    for error in (1e-12, 3e-11, 2e-12):
        comparison.add("a", error)
    comparison.add("b", 1e-11)
    assert comparison.worst(2) == [("a", 3e-11), ("b", 1e-11)]
    assert comparison.as_dict() == {
        "worst": {"name": "a", "relative_error": 3e-11},
        "count": 4,
    }


@pytest.mark.parametrize("later", [0.0, 1.0, INF])
def test_a_nan_stands_whatever_follows_it(later):
    comparison = Comparison()
    comparison.add("a", NAN)
    comparison.add("a", later)
    comparison.add("b", 5.0)
    name, error = comparison.worst(1)[0]
    assert name == "a"
    assert np.isnan(error)


# The verdict


def test_the_first_error_above_the_tolerance_is_named():
    verdict = Verdict({"tp": 2}, tolerance=1e-10)
    verdict.note(1, "loss", None, 1e-10)
    assert verdict.passed
    verdict.note(2, "gradients", "a", 2e-10)
    verdict.note(2, "grad_norm", None, 1.0)
    assert not verdict.passed
    assert verdict.first == {"step": 2, "kind": "gradients", "name": "a"}


@pytest.mark.parametrize("error", [NAN, INF])
def test_what_is_no_number_does_not_pass(error):
    verdict = Verdict({})
    verdict.note(1, "loss", None, error)
    assert verdict.first == {"step": 1, "kind": "loss", "name": None}


def test_the_json_has_exactly_these_keys():
    verdict = Verdict({"tp": 2, "sequence": True})
    verdict.gradients.add("a", 1e-15)
    verdict.weights.add("b", 2e-15)
    worst = {"name": "b", "relative_error": 2e-15}
    expected = {
        "passed": True,
        "tolerance": 1e-10,
        "layout": {"tp": 2, "sequence": True},
        "loss": {"relative_error": 0.0},
        "grad_norm": {"relative_error": 0.0},
        "gradients": {"worst": {"name": "a", "relative_error": 1e-15}, "count": 1},
        "weights": {"worst": worst, "count": 1},
        "first_difference": None,
    }
    assert json.loads(json.dumps(verdict.as_dict())) == expected
    verdict.note(3, "weights", "b", 1.0)
    found = json.loads(json.dumps(verdict.as_dict()))
    assert found["passed"] is False
    assert found["first_difference"] == {"step": 3, "kind": "weights", "name": "b"}
