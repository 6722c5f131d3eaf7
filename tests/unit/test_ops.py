"""Every array operation of NumPy against the reference."""

import importlib.util
import inspect

import numpy as np
import pytest
from numeric import assert_close
from ops_cases import CALLS, perform

from mpipar.ops import make_ops
from mpipar.ops.base import Ops
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.device import DeviceOps
from mpipar.ops.numpy_ops import NumpyOps

# (b, s, width); the last two cross the row blocks of every operation, in both types.
SIZES = [(1, 1, 1), (1, 1, 5), (2, 3, 1), (3, 5, 6), (2, 85, 3000), (2, 20_000, 2)]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numpy_agrees_with_the_reference(call, size, dtype):
    results, before, after = perform(NumpyOps(dtype), call, size, dtype)
    expected, _, written = perform(Ops(dtype="float64"), call, size, "float64")
    for place, (x, y) in enumerate(zip(results, expected, strict=True)):
        assert_close(x, y, TOLERANCE[dtype], f"result {place}")
        assert not isinstance(x, np.ndarray) or x.dtype == dtype
    for name, x in after.items():
        if name in call.writes:
            assert_close(x, written[name], TOLERANCE[dtype], name)
        else:
            assert np.array_equal(x, before[name]), f"{name} was written to"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_reference_keeps_its_type_and_its_inputs(call, dtype):
    results, before, after = perform(Ops(dtype=dtype), call, (3, 5, 6), dtype)
    assert all(x.dtype == dtype for x in results if isinstance(x, np.ndarray))
    for name in before.keys() - set(call.writes):
        assert np.array_equal(after[name], before[name]), f"{name} was written to"


def test_every_operation_on_arrays_is_among_the_calls():
    """A new operation must join the list above; the rest is tested elsewhere."""
    elsewhere = {
        "empty", "zeros", "to_host", "matmul_rate", "scratch",
        "attention_fwd", "attention_bwd", "attention_flops", "dropout_scale", "dropout",
        "fill_normal", "precision", "operand", "empty_operand", "is_mixed",
        "wide", "store", "add_to", "linear_gelu_dx", "narrow_results",
        "attention_method", "square_sums", "store_stochastic",
    }  # fmt: skip
    elsewhere |= public(DeviceOps)
    assert public(Ops) == elsewhere | {call.op for call in CALLS}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [NumpyOps, CupyOps])
def test_overrides_have_the_signature_of_the_reference(kind):
    properties = {
        "on_host", "is_mixed", "narrow_results", "precision", "attention_method",
    }  # fmt: skip
    for name in public(Ops) - properties:
        theirs, ours = (inspect.signature(getattr(k, name)) for k in (kind, Ops))
        shape = [[(p.name, p.kind, p.default) for p in s.parameters.values()]
                 for s in (theirs, ours)]  # fmt: skip
        assert shape[0] == shape[1], name


@pytest.mark.parametrize(
    ("precision", "dtype", "operand"),
    [
        ("fp64", "float64", "float64"),
        ("fp32", "float32", "float32"),
        ("bf16", "float32", "uint16"),
        ("fp16", "float32", "float16"),
    ],
)
def test_types_follow_from_the_precision(precision, dtype, operand, monkeypatch):
    find = importlib.util.find_spec
    for missing in ("", "numba"):
        monkeypatch.setattr(
            "importlib.util.find_spec",
            lambda name, gone=missing: None if name == gone else find(name),
        )
        ops = make_ops("cpu", precision)
        assert (ops.dtype, ops.operand_dtype) == (dtype, operand)
        assert ops.precision == precision and ops.is_mixed == (dtype != operand)
        assert isinstance(ops, NumpyOps) == (not missing)


def test_ops_are_made_by_device_and_precision():
    for precision, dtype in (("fp32", "float32"), ("fp64", "float64")):
        ops = make_ops("cpu", precision)
        assert type(ops) is NumpyOps and ops.dtype == dtype and ops.on_host
        assert ops.empty((2, 3)).dtype == ops.zeros((2, 3)).dtype == dtype
        x = np.arange(3)
        assert ops.asarray(x) is x and ops.to_host(x) is x
