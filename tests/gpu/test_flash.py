"""Attention by tensor cores, run on the CPU, against the reference in float64."""

import numpy as np
import pytest
from gpu.precisions import OPERANDS, PRECISIONS
from gpu.shim.compile import GXX, Module, ShimError, library
from numeric import assert_close

from mpipar.ops.attention import Draws
from mpipar.ops.base import Ops
from mpipar.ops.cuda.ops import CudaOps
from mpipar.ops.cuda.programs import source
from mpipar.ops.half import narrow, widen
from mpipar.ops.philox import stream_key
from mpipar.ops.spans import causal_spans

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

# Of outputs and gradients, where the largest number is 1
TOLERANCE = {"bf16": 2**-7, "fp16": 2**-10}


def on_cpu(precision: str, *, backwards: bool = False, edit: tuple = ()) -> CudaOps:
    """CUDA ops run by the shim; `edit` replaces a piece of a program."""

    def compile_program(text, names):
        if edit and edit[0] in text:
            text = text.replace(*edit)
        return Module(library(text, names), names, backwards)

    dtype, half = PRECISIONS[precision]
    return CudaOps(np, compile_program, dtype, half)


def spans_of_documents(b: int, s: int) -> np.ndarray:
    """Begins that differ by sequence, windows, and queries that see nothing."""
    rng, end = np.random.default_rng(4), np.tile(np.arange(1, s + 1), (b, 1))
    begin = rng.integers(0, end)
    end[:, ::7] = begin[:, ::7]
    return np.stack([begin, end, end - begin])


def case(name: str, precision: str) -> tuple[dict, dict]:
    """Arrays of a call in the operand type, and its rule."""
    b, s, n, g, h = {"square": (1, 130, 2, 1, 64), "documents": (2, 75, 4, 2, 40),
                     "wide": (1, 66, 1, 1, 128)}[name]  # fmt: skip
    rng, dtype = np.random.default_rng(3), np.dtype(OPERANDS[precision])

    def draw(*shape):
        x = rng.standard_normal(shape, np.float32)
        return narrow(x, np.empty(shape, dtype))

    fused, do = draw(b, s, n + 2 * g, h), draw(b, s, n, h)
    spans = spans_of_documents(b, s) if name == "documents" else causal_spans(s)
    rule = {"scale": 1 / np.sqrt(h), "spans": spans}
    return {"fused": fused, "do": do, "groups": (n, n + g)}, rule


def drop(ops, rule: dict, b: int, n: int) -> dict:
    """The rule with every fourth probability dropped, of keys at odd positions."""
    s = rule["spans"].shape[2]
    streams = tuple(stream_key(7, f"head.{i}") for i in range(n))
    places = 2 * np.arange(s) + 1
    draws = Draws(0.25, streams, np.arange(5, 5 + b), 3, places, places, ops)
    return rule | {"dropout": draws}


def attend(ops, arrays: dict, rule: dict, *, added: bool) -> list[np.ndarray]:
    """o, exp(lse), and gradients, added to some or written over them."""
    exact = ops.dtype == np.float64
    fused, do = (
        widen(arrays[x]).astype(np.float64) if exact else arrays[x]
        for x in ("fused", "do")
    )
    q, k, v = np.split(fused, arrays["groups"], axis=2)
    o, lse = ops.attention_fwd(q, k, v, **rule)
    if added or exact:
        grads = np.full(fused.shape, 0.5 if added else 0.0, ops.dtype)
    else:
        grads = np.full(fused.shape, 0x7FFF, np.uint16).view(fused.dtype)
    dq, dk, dv = np.split(grads, arrays["groups"], axis=2)
    ops.attention_bwd(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, **rule)
    return [o, np.exp(lse), dq, dk, dv]


def check(precision, name, *, added=False, dropped=False, edit=()):
    arrays, rule = case(name, precision)
    b, _, n, _ = arrays["do"].shape
    runs = []
    for ops in (
        on_cpu(precision, edit=edit),
        on_cpu(precision, backwards=True, edit=edit),
        Ops(dtype="float64"),
    ):
        own = drop(ops, rule, b, n) if dropped else rule
        runs.append(attend(ops, arrays, own, added=added))
    for x, other, exact in zip(*runs, strict=True):
        assert np.array_equal(x, other), "the order of threads matters"
        assert_close(widen(x), exact, TOLERANCE[precision])


@pytest.mark.parametrize("name", ["square", "documents", "wide"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_flash_attention_agrees_with_the_reference(precision, name):
    check(precision, name)


def test_gradients_are_added_to_arrays_of_the_compute_type():
    check("bf16", "documents", added=True)


def test_gradients_with_dropout_agree_with_the_reference():
    check("fp16", "documents", dropped=True)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_kernels_drop_what_the_reference_drops(precision):
    """Where queries are zero and values the identity, o shows each factor."""
    b, s, n, h = 2, 24, 3, 24
    q = np.zeros((b, s, n, h), OPERANDS[precision])
    v = np.zeros((b, s, 1, h), OPERANDS[precision])
    one = narrow(np.ones(1, np.float32), np.zeros(1, v.dtype))
    v[:, range(s), 0, range(s)] = one
    seen = np.full((1, s), s)
    shown = []
    for ops in (on_cpu(precision), Ops(dtype="float64")):
        rule = {"scale": 1.0, "spans": np.stack([seen - s, seen, seen])}
        exact = ops.dtype == np.float64
        at = (q * 0.0, v * 0.0, v != 0) if exact else (q, 0 * v, v)
        shown.append(ops.attention_fwd(*at, **drop(ops, rule, b, n))[0] != 0)
    assert np.array_equal(*shown) and 0.7 < shown[0].mean() < 0.8


FAULTS = {
    "no barrier": ("__syncthreads();  // until all have done with the tiles", "//"),
    "a key too many": ("key < to[half]", "key <= to[half]"),
    "a row of another lane": ("const int row = lane / 4 + half * 8;",
                              "const int row = lane / 4 + half * 4;"),
    "columns of another lane": ("lane / 8 % 2 * 8;", "lane / 16 % 2 * 8;"),
    "a tile too few": ("at < reach.high; at += SHORT", "at < reach.high - SHORT; "
                       "at += SHORT"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_flash_attention_is_caught(fault):
    edit = FAULTS[fault]
    assert edit[0] in source("flash")
    with pytest.raises((AssertionError, ShimError)):
        check("bf16", "square", edit=edit)
