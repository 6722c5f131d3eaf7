"""Attention by cuDNN, whose frontend is played by NumPy, against own kernels."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu.shim.compile import GXX
from gpu.test_flash import attend, case, drop, on_cpu
from numeric import assert_close
from parity.build import count_valid, make_batch, make_recipe, scatter, serial_recipe

from mpipar.engine import Engine
from mpipar.errors import DeviceError
from mpipar.grid import serial_grid
from mpipar.ops.base import Ops
from mpipar.ops.half import widen

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")


@pytest.fixture
def cudnn(monkeypatch):
    """The frontend, freshly imported."""
    file = Path(__file__).parent / "emulator" / "cudnn.py"
    found = importlib.util.spec_from_file_location("cudnn", file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    return module


def with_cudnn(precision: str = "bf16", choice: str = "auto"):
    ops = on_cpu(precision)
    ops.choose_attention(choice, ops.products.device)
    return ops


def windowed(rule: dict, window: int) -> dict:
    begin, end, _ = rule["spans"]
    begin = np.maximum(end - window, 0)
    return rule | {"spans": np.stack([begin, end, end - begin])}


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_cudnn_agrees_with_the_reference(cudnn, precision, window):
    arrays, rule = case("square", precision)
    rule = windowed(rule, window) if window else rule
    ops = with_cudnn(precision)
    got = attend(ops, arrays, rule, added=False)
    exact = attend(Ops(dtype="float64"), arrays, rule, added=False)
    assert cudnn.counts == {"plans": 2, "runs": 2}
    for x, y in zip(got, exact, strict=True):
        assert_close(widen(x), y, {"bf16": 2**-7, "fp16": 2**-10}[precision])
    attend(ops, arrays, rule, added=False)
    assert cudnn.counts == {"plans": 2, "runs": 4}


def test_own_kernels_do_what_cudnn_cannot(cudnn):
    """Gradients that are added to, dropout, documents."""
    ops = with_cudnn()
    arrays, rule = case("square", "bf16")
    attend(ops, arrays, rule, added=True)
    assert cudnn.counts["runs"] == 1  # the forward pass
    b, s, n, _ = arrays["do"].shape
    attend(ops, arrays, drop(ops, rule, b, n), added=False)
    attend(ops, *case("documents", "bf16"), added=False)
    q, k, v = np.split(arrays["fused"], arrays["groups"], axis=2)
    ops.attention_fwd(q, k, v, **rule, part=True)
    ops.attention_fwd(q, k.copy(), v.copy(), **rule)  # as if from a cache
    assert cudnn.counts["runs"] == 1


def test_what_cudnn_refuses_is_told_or_an_error(cudnn):
    arrays, rule = case("square", "bf16")
    cudnn.WIDEST = 32
    ops = with_cudnn()
    with pytest.warns(RuntimeWarning, match="own kernels do it"):
        got = attend(ops, arrays, rule, added=False)
    own = attend(on_cpu("bf16"), arrays, rule, added=False)
    assert all(np.array_equal(x, y) for x, y in zip(got, own, strict=True))
    with pytest.raises(DeviceError, match='"auto" or "flash"'):
        attend(with_cudnn(choice="cudnn"), arrays, rule, added=False)


def test_the_method_is_told(cudnn, monkeypatch):
    assert with_cudnn().attention_method == "attention by cuDNN 9.28.0"
    assert with_cudnn(choice="flash").attention_method == "own attention kernels"
    assert with_cudnn("fp32").cudnn is None
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert with_cudnn().attention_method.startswith("own attention kernels (")
    with pytest.raises(DeviceError, match="pip install"):
        with_cudnn(choice="cudnn")


@pytest.mark.parametrize(
    ("choice", "family"), [("cudnn", "llama"), ("cudnn", "gpt"), ("flash", "gpt")]
)
def test_a_model_trains_as_the_reference_does(cudnn, choice, family):
    """Heads travel as operands between products and attention."""
    groups = "model.kv_heads=2" if family == "llama" else "model.kv_heads=4"
    words = ["model.width=32", "model.heads=4", "model.layers=1", groups]
    recipe = serial_recipe(make_recipe(1, f"model.family={family}", *words))
    batch, lines = make_batch(recipe, 0), []
    for ops in (with_cudnn(choice=choice), Ops(dtype="float32", half="bf16")):
        engine = Engine(recipe, serial_grid(), ops)
        scatter(engine)
        step = engine.step([batch], count_valid(batch))
        lines.append([step.loss, step.grad_norm])
    assert np.allclose(*lines, rtol=2e-3, atol=0), lines
    assert cudnn.counts["runs"] == (2 if choice == "cudnn" else 0)


@pytest.mark.parametrize(
    "edit",
    [
        ("grad.uid", "tensor.set_output(True).set_uid(uid)", "tensor.set_uid(uid)"),
        ("a mask", '"diagonal_band_right_bound": 0', '"diagonal_band_right_bound": 1'),
    ],
    ids=lambda edit: edit[0],
)
def test_a_fault_in_a_graph_is_caught(cudnn, edit, monkeypatch):
    from mpipar.ops.cuda import cudnn_attention

    text = Path(cudnn_attention.__file__).read_text(encoding="utf-8")
    assert edit[1] in text
    room = dict(vars(cudnn_attention))
    exec(text.replace(*edit[1:]), room)
    ops, (arrays, rule) = with_cudnn(), case("square", "bf16")
    ops.cudnn = room["CudnnAttention"](ops.products.device, ops.operand_dtype)
    monkeypatch.setattr("mpipar.ops.cuda.attention.Refused", room["Refused"])
    with pytest.raises((AssertionError, RuntimeError, RuntimeWarning)):
        attend(ops, arrays, rule, added=False)
