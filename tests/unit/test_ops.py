"""Every array operation of NumPy against the reference."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numeric import Draw, assert_close

from mpipar.ops import make_ops
from mpipar.ops.base import Ops
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.numpy_ops import NumpyOps

# (b, s, width); the last two cross the row blocks of every operation, in both types.
SIZES = [(1, 1, 1), (1, 1, 5), (2, 3, 1), (3, 5, 6), (2, 85, 3000), (2, 20_000, 2)]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1, "scale": 0.5}


@dataclass(frozen=True)
class Call:
    """An operation, its arguments, and those that its docstring says it writes."""

    op: str
    arguments: Callable[[Draw], dict]
    writes: tuple[str, ...] = ()
    label: str = ""

    def __str__(self):
        return self.label or self.op


def norm_grads(draw):
    x = draw.rows()
    return {
        "dy": draw.rows(), "x": x, "rstd": np.abs(x).mean(-1) + draw.dtype.type(0.5),
        "gain": draw(draw.width), "dgain": draw(draw.width),
    }  # fmt: skip


def swiglu_grads(draw):
    (gate, up), (dgate, dup) = draw.halves(), draw.halves()
    return {"dy": draw.rows(), "gate": gate, "up": up, "dgate": dgate, "dup": dup}


def loss_rows(draw):
    tokens = draw.b * draw.s
    logits = draw(tokens, draw.width)
    local = draw.ids(-2, draw.width + 2).reshape(-1)
    return {"logits": logits, "local": local, "peak": logits.max(-1) + 1}


def loss_grads(draw):
    tokens = draw.b * draw.s
    local = draw.ids(-2, draw.width + 2).reshape(-1)
    e = np.exp(draw(tokens, draw.width))
    return {"e": e, "total": e.sum(-1) + 1, "local": local, "seed": draw(tokens)}


def adam(draw, **options):
    size = draw.b * draw.s * draw.width
    flat = {name: draw(size) for name in ("weight", "grad", "m", "v")}
    return flat | {"v": np.abs(flat["v"]), "step": 3} | ADAM | options


def parts_of_attention(draw):
    """Outputs and log-sum-exps over two sets of keys."""
    o, part = (draw(draw.b, draw.s, 2, draw.width) for _ in "12")
    lse, level = (9 * draw(draw.b, 2, draw.s) for _ in "12")
    return {"o": o, "lse": lse, "part": part, "level": level}


def fused_heads(draw):
    """A query view of a fused array, and a rotation."""
    half = min(draw.width, 20)
    fused = draw(draw.b, draw.s, 5, 2 * half)
    table = {name: draw(draw.s, half) for name in ("cos", "sin")}
    return {"x": fused[:, :, 1:3]} | table


def routed_rows(draw):
    """Rows of three choices a token, every other one of the first token's not taken."""
    count, k = draw.b * draw.s, 3
    taken = np.ones((count, k), bool)
    taken[0, ::2] = False
    tokens, slots = (x[::-1].copy() for x in np.nonzero(taken))
    places = np.full((count, k), len(tokens))
    places[tokens, slots] = np.arange(len(tokens))
    gates, rows = draw(count, k), draw(len(tokens), draw.width)
    there = {"rows": rows, "places": places, "out": draw(count, draw.width)}
    back = {"dy": draw(count, draw.width), "rows": rows, "tokens": tokens,
            "slots": slots, "dgates": draw(count, k)}  # fmt: skip
    return there | {"gates": gates}, back | {"gates": gates}


CALLS = [
    Call("linear_fwd", lambda d: {"x": d.rows(3), "w": d(d.width, 3), "b": d(d.width)}),
    Call("linear_fwd", lambda d: {"x": d.rows(4)[..., 1:], "w": d(d.width, 3)},
         label="linear_fwd of a view without bias"),
    Call("linear_fwd", lambda d: {"x": d.rows(3), "w": d(d.width, 3), "b": d(d.width),
                                  "onto": d.rows()}, label="linear_fwd onto"),
    Call("linear_fwd", lambda d: {"x": d.rows(3), "w": d(d.width, 3),
                                  "onto": d.rows()}, label="linear_fwd onto, no bias"),
    Call("add_residual", lambda d: {"y": d.rows(), "b": d(d.width), "onto": d.rows()},
         ("y",)),
    Call("add_residual", lambda d: {"y": d.rows(), "b": None, "onto": d.rows()},
         ("y",), "add_residual, no bias"),
    Call("linear_dx", lambda d: {"dy": d.rows(), "w": d(d.width, 3)}),
    Call("linear_dw", lambda d: {"dy": d.rows(), "x": d.rows(3), "dw": d(d.width, 3)},
         ("dw",)),
    Call("linear_db", lambda d: {"dy": d.rows(), "db": d(d.width)}, ("db",)),
    Call("gelu_fwd", lambda d: {"x": d.rows(), "tanh": True}, label="gelu_fwd tanh"),
    Call("gelu_fwd", lambda d: {"x": d.rows(), "tanh": False}, label="gelu_fwd erf"),
    Call("gelu_dx", lambda d: {"dy": d.rows(), "slope": d.rows()}, ("dy",)),
    Call("swiglu_fwd", lambda d: dict(zip(("gate", "up"), d.halves(), strict=True))),
    Call("swiglu_dx", swiglu_grads, ("dgate", "dup")),
    Call("erf", lambda d: {"x": d.rows()}),
    Call("layernorm_fwd", lambda d: {"x": d.rows(), "gain": d(d.width),
                                     "bias": d(d.width), "eps": 1e-2}),
    Call("layernorm_bwd",
         lambda d: norm_grads(d) | {"mean": d(d.b, d.s), "dbias": d(d.width)},
         ("dgain", "dbias")),
    Call("rmsnorm_fwd", lambda d: {"x": d.rows(), "gain": d(d.width), "eps": 1e-5}),
    Call("rmsnorm_bwd", norm_grads, ("dgain",)),
    Call("rmsnorm_bwd", lambda d: norm_grads(d) | {"onto": d.rows()}, ("dgain",),
         "rmsnorm_bwd onto"),
    Call("layernorm_bwd",
         lambda d: norm_grads(d) | {"mean": d(d.b, d.s), "dbias": d(d.width),
                                    "onto": d.rows()},
         ("dgain", "dbias"), "layernorm_bwd onto"),
    Call("rope_table", lambda d: {"positions": np.arange(d.s), "width": 2 * d.width,
                                  "theta": 10000.0}),
    Call("rope", fused_heads, ("x",)),
    Call("rope", lambda d: fused_heads(d) | {"inverse": True}, ("x",), "rope inverse"),
    Call("attention_merge", parts_of_attention, ("o", "lse")),
    Call("embedding_fwd", lambda d: {"ids": d.ids(0, 9), "table": d(4, d.width),
                                     "first": 3}),
    Call("embedding_dw", lambda d: {"dy": d.rows(), "ids": d.ids(0, 9),
                                    "dtable": d(4, d.width), "first": 3}, ("dtable",)),
    Call("add_positions", lambda d: {"x": d.rows(), "table": d(d.s + 2, d.width),
                                     "rows": np.arange(d.s)[::-1] + 1}, ("x",)),
    Call("positions_dw", lambda d: {"dy": d.rows(), "rows": np.arange(d.s)[::-1] + 1,
                                    "dtable": d(d.s + 2, d.width)}, ("dtable",)),
    Call("gather_rows", lambda d: {"x": d(9, d.width),
                                   "index": d.ids(0, 9).reshape(-1)}),
    Call("combine_rows", lambda d: routed_rows(d)[0], ("out",)),
    Call("combine_rows", lambda d: routed_rows(d)[0] | {"gates": None}, ("out",),
         "combine_rows without gates"),
    Call("combine_rows_bwd", lambda d: routed_rows(d)[1], ("dgates",)),
    Call("row_max", lambda d: {"logits": d.rows()}),
    Call("row_sum", lambda d: {"x": d.rows()}),
    Call("row_sum", lambda d: {"x": d.halves()[1]}, label="row_sum of a view"),
    Call("xent_fwd", loss_rows, ("logits",)),
    Call("xent_dx", loss_grads, ("e",)),
    Call("square_sum", lambda d: {"x": d(d.b * d.s * d.width)}),
    Call("adamw", adam, ("weight", "m", "v")),
    Call("adamw", lambda d: adam(d, decay=0.0), ("weight", "m", "v"), "adamw no decay"),
]  # fmt: skip


def perform(ops, call, size, dtype):
    """Results of a call, and its arguments before and after."""
    before, after = (call.arguments(Draw(np.dtype(dtype), size)) for _ in "12")
    result = getattr(ops, call.op)(**after)
    results = result if isinstance(result, tuple) else (result,)
    return [r for r in results if r is not None], before, after


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
        "empty", "zeros", "asarray", "to_host", "synchronize", "matmul_rate", "scratch",
        "attention_fwd", "attention_bwd", "attention_flops", "dropout_scale",
        "fill_normal", "on_host", "precision", "operand", "empty_operand", "is_mixed",
        "wide", "store", "add_to",
    }  # fmt: skip
    assert public(Ops) == elsewhere | {call.op for call in CALLS}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [NumpyOps, CupyOps])
def test_overrides_have_the_signature_of_the_reference(kind):
    for name in public(Ops) - {"on_host", "is_mixed", "precision"}:
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
