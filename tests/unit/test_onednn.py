"""bf16 products through oneDNN against NumPy, and what is refused."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numeric import from_bf16, to_bf16

from mpipar.errors import DeviceError, ShapeError
from mpipar.ops import onednn
from mpipar.ops.onednn import Products, why_not

EPSILON = 2.0**-24
SIZES = [(1, 1, 1), (1, 65, 7), (65, 1, 3), (3, 7, 1), (7, 65, 3), (65, 64, 130)]


@pytest.fixture(scope="module")
def products() -> Products:
    if reason := why_not():
        pytest.skip(reason)
    return Products()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Random bf16 bits."""
    rng = np.random.default_rng([seed, *shape])
    return to_bf16(rng.standard_normal(shape, np.float32))


def value(x: np.ndarray) -> np.ndarray:
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)


def stored(x: np.ndarray, by_columns: bool) -> np.ndarray:
    """The same values, with the last two dims transposed in memory if asked."""
    if not by_columns:
        return x
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def check(products, a, b, out, *, bias=None, accumulate=False) -> None:
    """Multiply, and bound each error by the sum of the sizes of its terms."""
    exact = value(a) @ value(b)
    size = np.abs(value(a)) @ np.abs(value(b))
    for extra in (bias, value(out) if accumulate else None):
        exact = exact if extra is None else exact + extra
        size = size if extra is None else size + np.abs(extra)
    products.multiply(a, b, out, bias=bias, accumulate=accumulate)
    bound = (a.shape[-1] + 3) * EPSILON * size
    if out.dtype == np.uint16:
        bound = bound + 2.0**-8 * np.abs(exact)
    assert (np.abs(value(out) - exact) <= bound).all()


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_products_are_those_of_numpy_in_every_memory_order(products, m, k, n, dtype):
    for ta, tb, tout in product((False, True), repeat=3):
        a, b = stored(normal(m, k), ta), stored(normal(k, n, seed=1), tb)
        check(products, a, b, stored(np.zeros((m, n), dtype), tout))


def test_float32_inputs_stay_float32(products):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(s, np.float32) for s in ((33, 20), (20, 9)))
    check(products, a, b, np.empty((33, 9), np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_accumulate_and_bias_add_to_the_product(products, dtype):
    a, b = normal(40, 24), normal(24, 17)
    bias = np.linspace(-3.0, 3.0, 17, dtype=np.float32)
    for accumulate, extra in product((False, True), (None, bias)):
        out = normal(40, 17, seed=3)
        out = out if dtype == np.uint16 else from_bf16(out)
        check(products, a, b, out, bias=extra, accumulate=accumulate)
    by_columns = stored(np.ones((40, 17), np.float32), True)
    check(products, a, b, by_columns, accumulate=True)


def test_views_into_wider_arrays_leave_the_rest_alone(products):
    wide = np.full((12, 30), 9.0, np.float32)
    x = normal(12, 65)
    for first in (1, 3):
        check(products, x[:, first : first + 8], normal(8, 10), wide[:, 10:20])
        check(products, x[first:, :1], normal(1, 10), wide[first:, 10:20])
        check(products, x.T[first : first + 1], normal(12, 30), wide[:1])
    assert (wide[1:, :10] == 9.0).all() and (wide[1:, 20:] == 9.0).all()


@pytest.mark.parametrize("heads", [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("fused", [False, True])
def test_attention_multiplies_views_of_heads(products, heads, fused):
    (b, n), s, h = heads, 6, 8
    if fused:
        x = normal(b, s, 3 * n, h).transpose(0, 2, 1, 3)
        q, k, v = x[:, :n], x[:, n : 2 * n], x[:, 2 * n :]
    else:
        q, k, v = (normal(b, s, n, h, seed=i).transpose(0, 2, 1, 3) for i in range(3))
    scores = np.empty((b, n, 4, s), np.float32)
    check(products, q[:, :, 2:], k.swapaxes(-1, -2), scores)
    p = to_bf16(scores)
    o = np.zeros((b, s, n, h), np.float32).transpose(0, 2, 1, 3)
    check(products, p, v, o[:, :, 2:])
    check(products, p[..., :5], v[:, :, :5], o[:, :, 2:], accumulate=True)
    check(products, p.swapaxes(-1, -2), q[:, :, 2:], o)
    check(products, p.swapaxes(-1, -2), q[:, :, 2:], o, accumulate=True)
    assert (o[:, :, :2] != 0.0).all()


def test_key_heads_are_shared_by_query_heads(products):
    q = normal(2, 5, 3, 2, 8).transpose(0, 2, 3, 1, 4)
    k = normal(2, 5, 3, 1, 8).transpose(0, 2, 3, 1, 4)
    check(products, q, k.swapaxes(-1, -2), np.empty((2, 3, 2, 5, 5), np.float32))
    check(
        products, normal(4, 5, 8), normal(8, 3)[None], np.empty((4, 5, 3), np.float32)
    )


def test_odd_strides_of_dims_of_size_one_do_not_matter(products):
    a, b, out = normal(64, 48), normal(48, 32), np.empty((1, 64, 32), np.float32)
    check(products, a[None], b[None], out)
    steps = np.lib.stride_tricks.as_strided
    for step in (0, 2, 6, 1 << 40):
        row = steps(a, (1, 48), (step, 2))
        check(products, row, b, steps(out, (1, 32), (2 * step, 4)))
        column = steps(a, (64, 1), (96, step))
        check(products, column, steps(b, (1, 32), (step, 2)), out[0])
        heads = steps(a, (1, 2, 32, 48), (step, 3072, 96, 2))
        check(products, heads, b[None, None], out.reshape(1, 2, 32, 32))


def test_nan_and_infinity_pass_through(products):
    a, b = normal(8, 16), to_bf16(np.ones((16, 8), np.float32))
    a[1, 3], a[2, 4] = to_bf16(np.array([np.nan, np.inf], np.float32))
    a[3, 5], a[4, 6], a[4, 7] = to_bf16(np.array([-np.inf, np.inf, -np.inf], "f4"))
    for out in (np.empty((8, 8), np.float32), np.empty((8, 8), np.uint16)):
        products.multiply(a, b, out)
        found = value(out)
        assert np.isnan(found[[1, 4]]).all()
        assert (found[2] == np.inf).all() and (found[3] == -np.inf).all()
        assert np.isfinite(found[[0, 5, 6, 7]]).all()


def test_the_scratchpad_grows_with_the_products(products):
    few = Products()
    start = few._scratchpad.size
    wide = np.zeros((1200, 400), np.uint16)[:, :300]
    check(few, normal(1200, 8), normal(8, 300), wide, accumulate=True)
    assert few._scratchpad.size > start


def test_two_threads_give_the_same_product(products):
    a, b = normal(130, 70), normal(70, 50)
    for threads in (2, 1):
        products.set_threads(threads)
        assert len(products) == 0
        check(products, a, b, np.empty((130, 50), np.float32))


ROW = np.zeros((4, 4), np.uint16)
FLOAT = np.zeros((4, 4), np.float32)


@pytest.mark.parametrize(
    ("a", "b", "out", "words"),
    [
        (ROW[:, :3], ROW, FLOAT, "no product"),
        (ROW, ROW, FLOAT[:3], "no product"),
        (ROW[None], ROW, FLOAT, "no product"),
        (ROW[None], ROW[None], np.zeros((2, 4, 4), np.float32), "no product"),
        (np.stack([ROW] * 2), np.stack([ROW] * 3), np.stack([FLOAT] * 3), "no prod"),
        (ROW[0], ROW, FLOAT[0], "no product"),
        (ROW[:0], ROW, FLOAT[:0], "no product"),
        (ROW[:, :0], ROW[:0], FLOAT, "no product"),
        (ROW, FLOAT, FLOAT, "both uint16 or both float32"),
        (FLOAT, FLOAT, ROW, "out float32 or of their type"),
        (ROW, ROW, FLOAT.astype(np.float64), "not uint16, uint16 and float64"),
        (ROW, ROW, FLOAT.astype(">f4"), "out float32"),
        (np.zeros((4, 8), np.uint16)[:, ::2], ROW, FLOAT, "must be contiguous"),
        (ROW[::-1], ROW, FLOAT, "reversed"),
        (np.broadcast_to(ROW[:1], (4, 4)), ROW, FLOAT, "repeated"),
        (np.broadcast_to(ROW, (2, 4, 4)), ROW[None], np.stack([FLOAT] * 2), "repeated"),
        (np.stack([ROW] * 2)[::-1], ROW[None], np.stack([FLOAT] * 2), "reversed"),
        (np.zeros((4, 4), "u2,u1")["f0"], ROW, FLOAT, "must be contiguous"),
    ],
)
def test_wrong_operands_are_refused(products, a, b, out, words):
    kept = len(products)
    with pytest.raises(ShapeError, match=words):
        products.multiply(a, b, out)
    assert len(products) == kept


def test_a_wrong_bias_and_a_read_only_result_are_refused(products):
    bias = np.zeros(8, np.float32)
    products.multiply(ROW, ROW, FLOAT, bias=bias[:4])
    for wrong in (bias[:3], bias[::2], bias[:4].astype(np.float64), bias.reshape(2, 4)):
        with pytest.raises(ShapeError, match="bias must be float32"):
            products.multiply(ROW, ROW, FLOAT, bias=wrong)
    with pytest.raises(ShapeError, match="contiguous rows"):
        products.multiply(ROW, ROW, FLOAT.T, bias=bias[:4])
    frozen = FLOAT.copy()
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match="writeable"):
        products.multiply(ROW, ROW, frozen)


def test_a_layout_without_a_kernel_is_refused(products, monkeypatch):
    name = b"ref:any"

    def call(function, plan, what, index, result):
        result._obj.value = name

    monkeypatch.setattr(onednn, "_call", call)
    with pytest.raises(ShapeError, match=r"no fast product .*\(4, 4\) by \(8, 2\)"):
        onednn._refuse_reference(None, ROW, ROW, FLOAT)


def test_a_failed_call_names_function_and_status(products):
    with pytest.raises(DeviceError, match="dnnl_engine_create returned status 2"):
        onednn._call("dnnl_engine_create", None, 1, 0)


def test_compiled_products_are_bounded_and_reused(products):
    few = Products(capacity=3)
    for rows in (1, 2, 3, 4, 5, 4):
        check(few, normal(rows, 4), normal(4, 4), np.empty((rows, 4), np.float32))
        assert len(few) <= 3
    kept = few._products.copy()
    check(few, normal(4, 4), normal(4, 4), np.empty((4, 4), np.float32))
    assert few._products == kept


def test_ten_thousand_products_hold_no_more_memory(products):
    pages = Path("/proc/self/statm")
    few = Products(capacity=2)

    def run(count: int) -> int:
        for i in range(count):
            rows = 1 + i % 3 if i % 10 == 0 else 1
            few.multiply(ROW[:rows], ROW, FLOAT[:rows])
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    start = run(1000)
    assert run(10_000) - start < 1 << 20


def test_rounding_is_to_nearest_even_and_keeps_nan():
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000]
        + [0x7F800001, 0xFFFFFFFF, 0x80000000, 0x00000001],
        np.uint32,
    )
    want = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x8000, 0]
    assert to_bf16(bits.view(np.float32)).tolist() == want
    every = np.arange(1 << 16, dtype=np.uint16)
    back = to_bf16(from_bf16(every))
    nan = np.isnan(from_bf16(every))
    assert (back[~nan] == every[~nan]).all() and np.isnan(from_bf16(back[nan])).all()


def test_a_cpu_without_bf16_is_told_to_use_fp32(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: avx512_bf16\nflags\t\t: fpu avx2 avx512f\n")
    for path in (cpuinfo, tmp_path / "missing"):
        monkeypatch.setattr(onednn, "CPUINFO", path)
        assert "AVX512-BF16 or AMX" in why_not() and '"fp32"' in why_not()
        with pytest.raises(DeviceError, match="AVX512-BF16"):
            Products()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (None, "oneDNN, which is not here; pip install"),
        ("/nowhere/libdnnl.so.3", "cannot be used: /nowhere/libdnnl.so.3"),
        ("libc.so.6", "cannot be used: .*dnnl_version"),
    ],
)
def test_a_missing_or_broken_library_is_explained(monkeypatch, tmp_path, path, words):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: amx_bf16\n")
    monkeypatch.setattr(onednn, "CPUINFO", cpuinfo)
    monkeypatch.setattr(onednn, "_find_library", lambda: path)
    monkeypatch.setattr(onednn, "_library", onednn._library.__wrapped__)
    with pytest.raises(DeviceError, match=words):
        Products()


def test_another_version_is_refused(products, monkeypatch):
    monkeypatch.setattr(onednn, "MAJOR", 4)
    with pytest.raises(DeviceError, match=r"need oneDNN 4, but .* is oneDNN 3; pip"):
        onednn._library.__wrapped__()


def test_the_environment_sets_the_threads(products):
    script = (
        "from mpipar.ops.onednn import _library\n"
        "print(_library().omp_get_max_threads())"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.stdout == "3\n"
