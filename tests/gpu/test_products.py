"""Products through cuBLASLt's C API, by a library that computes on the CPU."""

import ctypes

import numpy as np
import pytest
from gpu.precisions import OPERANDS, PRECISIONS
from gpu.shim.compile import GXX
from gpu.test_kernels import on_cpu
from numeric import assert_close

from mpipar.errors import DeviceError
from mpipar.ops.base import Ops
from mpipar.ops.cuda import cublaslt
from mpipar.ops.cuda.cublaslt import Epilogue, Library, Plan, Product
from mpipar.ops.cuda.device import HostDevice
from mpipar.ops.cuda.products import Products
from mpipar.ops.half import narrow, widen

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

EXACT = Ops(dtype="float64")
# Rounding of results in the compute type, and in the operand type
WIDE = {"fp64": 1e-13, "fp32": 1e-6, "bf16": 1e-6, "fp16": 1e-6}
NARROW = WIDE | {"bf16": 2**-8, "fp16": 2**-11}
# Tokens, inputs, outputs
SIZES = [(1, 1, 1), (6, 5, 7), (16, 32, 24), (70, 40, 136)]
every = pytest.mark.parametrize("precision", PRECISIONS)


class Drawn:
    """Operands of one precision, and the same numbers in float64."""

    def __init__(self, precision):
        self.rng, self.precision = np.random.default_rng(5), precision
        self.dtype = np.dtype(PRECISIONS[precision][0])
        self.operand = np.dtype(OPERANDS[precision])

    def __call__(self, *shape, wide=False):
        x = self.rng.standard_normal(shape).astype(self.dtype)
        if wide or self.operand == self.dtype:
            return x
        return narrow(x, np.empty(shape, self.operand))


def double(x):
    return None if x is None else widen(x).astype(np.float64)


def check(got, expected, tolerance, dtype):
    assert got.dtype == dtype and got.shape == expected.shape
    assert_close(double(got), expected, tolerance)


@every
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_agree_with_float64(size, precision):
    (t, d, f), draw, ops = size, Drawn(precision), on_cpu(precision)
    x, w, dy, b = draw(2, t, d), draw(f, d), draw(2, t, f), draw(f)
    for bias in (None, b, draw(f, wide=True)):
        for onto in (None, draw(2, t, f, wide=True)):
            y = EXACT.linear_fwd(double(x), double(w), double(bias), double(onto))
            check(ops.linear_fwd(x, w, bias, onto), y, WIDE[precision], draw.dtype)
            got = ops.linear_fwd(x, w, bias, onto, narrow=True)
            check(got, y, 2 * NARROW[precision], draw.operand)
    dx = EXACT.linear_dx(double(dy), double(w))
    check(ops.linear_dx(dy, w), dx, WIDE[precision], draw.dtype)
    narrowed = ops.linear_dx(dy, w, narrow=True)
    check(narrowed, dx, NARROW[precision], draw.operand)
    for wide, rounding in ((True, WIDE), (False, NARROW)):
        dw = draw(f, d, wide=wide)
        expected = double(dw)
        EXACT.linear_dw(double(dy), double(x), expected)
        ops.linear_dw(dy, x, dw)
        check(dw, expected, rounding[precision], dw.dtype)
    assert all(plan.algorithms for plan in ops.products.plans.values())


@every
def test_views_are_read_where_they_lie(precision, monkeypatch):
    """Rows in a wider array, rows of every second one, and addresses of all kinds."""
    draw, ops = Drawn(precision), on_cpu(precision)
    wide_x, w, dy = draw(2, 9, 40), draw(24, 16), draw(2, 9, 24)
    copies = []
    monkeypatch.setattr(ops, "_solid", lambda x: copies.append(x) or x)
    for x in (wide_x[..., 8:24], wide_x[..., 3:19], wide_x[:1, ::2, :16]):
        tokens = dy[: len(x), : x.shape[1]]
        y = EXACT.linear_fwd(double(x), double(w))
        check(ops.linear_fwd(x, w), y, WIDE[precision], draw.dtype)
        dw, expected = draw(24, 16, wide=True), np.zeros((24, 16))
        expected[...] = dw
        EXACT.linear_dw(double(tokens), double(x), expected)
        ops.linear_dw(tokens, x, dw)
        check(dw, expected, WIDE[precision], draw.dtype)
    flat = draw(24 * 16 + 1)[1:].reshape(24, 16)
    y = EXACT.linear_fwd(double(wide_x[..., :16]), double(flat))
    check(ops.linear_fwd(wide_x[..., :16], flat), y, WIDE[precision], draw.dtype)
    assert not copies
    alignments = {p.align_ab for p in ops.products.plans}
    assert alignments >= {16, draw.operand.itemsize}


def test_uneven_rows_are_copied():
    draw, ops = Drawn("bf16"), on_cpu("bf16")
    x, w = draw(3, 7, 12)[:, 1:5, ::-1], draw(8, 12)
    y = EXACT.linear_fwd(double(x), double(w))
    check(ops.linear_fwd(x, w), y, WIDE["bf16"], draw.dtype)


@every
def test_products_without_items(precision):
    draw, ops = Drawn(precision), on_cpu(precision)
    b, onto = draw(5), draw(4, 5, wide=True)
    assert ops.linear_fwd(draw(0, 3), draw(5, 3), b).shape == (0, 5)
    assert ops.linear_dx(draw(2, 0, 5), draw(5, 3)).shape == (2, 0, 3)
    got = ops.linear_fwd(draw(4, 0), draw(5, 0), b, onto)
    check(got, onto + double(b), WIDE[precision], draw.dtype)
    got = ops.linear_fwd(draw(4, 0), draw(5, 0), b, narrow=True)
    check(got, double(b) + np.zeros((4, 5)), 0, draw.operand)
    dw = draw(5, 3)
    before = dw.copy()
    ops.linear_dw(draw(0, 5), draw(0, 3), dw)
    assert np.array_equal(dw, before) and not ops.products.calls


def test_factors_of_other_types():
    ops, draw = on_cpu("bf16"), Drawn("bf16")
    x, w = draw(4, 6, wide=True), draw(5, 6)
    y = EXACT.linear_fwd(double(x), double(w))
    check(ops.linear_fwd(x, w), y, WIDE["bf16"], np.float32)
    check(ops.linear_fwd(x, w, narrow=True), y, NARROW["bf16"], np.uint16)
    dw, dy = draw(5, 6), draw(4, 5, wide=True)
    expected = double(dw)
    EXACT.linear_dw(double(dy), double(x), expected)
    ops.linear_dw(dy, x, dw)
    check(dw, expected, NARROW["bf16"], np.uint16)
    with pytest.raises(TypeError, match="float64"):
        ops.linear_fwd(x.astype(np.float64), w)


# --- GELU -----------------------------------------------------------------------------


def gelu_pass(ops, draw, tanh=True, bias=True, width=24):
    """Outputs, input gradient and what is kept, of a projection, GELU and another."""
    x, w, b, dy = draw(2, 9, 16), draw(width, 16), draw(width), draw(2, 9, 12)
    down, b = draw(12, width), b if bias else None
    y, kept = ops.linear_gelu_fwd(x, w, b, tanh=tanh)
    du = ops.linear_gelu_dx(dy, down, kept, tanh=tanh)
    u = EXACT.linear_fwd(double(x), double(w), double(b))
    exact_y, slope = EXACT.gelu_fwd(u, tanh=tanh)
    exact_du = EXACT.linear_gelu_dx(double(dy), double(down), slope, tanh=tanh)
    check(y, exact_y, NARROW[draw.precision], draw.operand)
    check(du, exact_du, 2 * NARROW[draw.precision], draw.operand)
    return kept, u, slope


@every
@pytest.mark.parametrize("bias", [True, False])
def test_gelu_is_a_part_of_16_bit_products(precision, bias):
    draw, ops = Drawn(precision), on_cpu(precision)
    kept, u, slope = gelu_pass(ops, draw, bias=bias)
    is_half = precision in ("bf16", "fp16")
    check(kept, u if is_half else slope, NARROW[precision], draw.operand)
    kinds = {p.epilogue for p in ops.products.plans}
    first = Epilogue.GELU_AUX_BIAS if bias else Epilogue.GELU_AUX
    if is_half:
        assert kinds == {first, Epilogue.DGELU} and ops.products.calls == 2
    else:
        assert kinds <= {Epilogue.NONE, Epilogue.BIAS}


@pytest.mark.parametrize("way", ["erf", "odd width", "slow device", "no algorithm"])
def test_gelu_is_a_pass_of_its_own_elsewhere(way, monkeypatch):
    draw, ops = Drawn("bf16"), on_cpu("bf16")
    if way == "slow device":
        ops.products.device.capability = (8, 0)
    if way == "no algorithm":
        ask = Plan._ask
        monkeypatch.setattr(
            Plan, "_ask", lambda plan: [] if plan.product.epilogue & 32 else ask(plan)
        )
        monkeypatch.setattr(Epilogue, "has_aux", False)
    kept, u, slope = gelu_pass(
        ops, draw, tanh=way != "erf", width=21 if way == "odd width" else 24
    )
    keeps_input = way == "no algorithm"
    check(kept, u if keeps_input else slope, 2 * NARROW["bf16"], np.uint16)


# --- plans ----------------------------------------------------------------------------


def test_a_shape_is_planned_once():
    draw, ops = Drawn("bf16"), on_cpu("bf16")
    for _ in range(3):
        x, w, b = draw(2, 8, 16), draw(24, 16), draw(24)
        ops.linear_fwd(x, w, b)
        ops.linear_dx(draw(2, 8, 24), w)
        ops.linear_dw(draw(2, 8, 24), x, draw(24, 16))
    assert (ops.products.made, ops.products.calls) == (3, 9)
    ops.linear_fwd(x[:1], w, b)
    assert ops.products.made == 4


def test_the_oldest_plan_goes(monkeypatch):
    monkeypatch.setattr("mpipar.ops.cuda.products.CAPACITY", 2)
    draw, ops = Drawn("fp32"), on_cpu("fp32")
    w = draw(4, 8)
    for tokens in (1, 2, 3, 3, 1):
        x = draw(tokens, 8)
        check(ops.linear_fwd(x, w), double(x) @ double(w).T, 1e-6, np.float32)
    assert [p.rows for p in ops.products.plans] == [3, 1]


class Clock(HostDevice):
    """Says that the last algorithm is the fastest."""

    def __init__(self, times, capturing=False):
        super().__init__()
        self.times, self.capturing, self.asked = times, capturing, 0

    def milliseconds(self, work):
        work()
        self.asked += 1
        return self.times[self.asked - 1]

    def is_capturing(self):
        return self.capturing


@pytest.mark.parametrize(
    ("times", "chosen"), [((3, 2, 1), 2), ((1.02, 3, 1), 0), ((2, 1, 1.1), 1)]
)
def test_algorithms_are_timed_at_the_first_use(times, chosen):
    draw, ops = Drawn("bf16"), on_cpu("bf16")
    ops.products = Products(Clock(times), tune=True)
    dy, x, dw = draw(1024, 8), draw(1024, 16), draw(8, 16)
    expected = double(dw)
    for _ in range(2):
        EXACT.linear_dw(double(dy), double(x), expected)
        ops.linear_dw(dy, x, dw)
    check(dw, expected, 4 * NARROW["bf16"], np.uint16)
    (plan,) = ops.products.plans.values()
    assert plan.chosen == chosen and ops.products.device.asked == 3


def test_algorithms_are_not_timed_where_memory_is_short(monkeypatch):
    draw, ops = Drawn("bf16"), on_cpu("bf16")
    ops.products = Products(Clock(()), tune=True)

    def allocate(size):
        if size == 8 * 16 * 2:
            raise MemoryError
        return HostDevice.allocate(ops.products.device, size)

    monkeypatch.setattr(ops.products.device, "allocate", allocate)
    ops.linear_dw(draw(1024, 8), draw(1024, 16), draw(8, 16))
    assert ops.products.calls == 1


@pytest.mark.parametrize("way", ["few tokens", "32 bits", "captured"])
def test_some_products_are_not_timed(way):
    precision = "fp32" if way == "32 bits" else "bf16"
    draw, ops = Drawn(precision), on_cpu(precision)
    ops.products = Products(Clock((), way == "captured"), tune=True)
    tokens = 1000 if way == "few tokens" else 1024
    ops.linear_fwd(draw(tokens, 8), draw(16, 8))
    (plan,) = ops.products.plans.values()
    assert plan.chosen == 0


# --- what the library refuses ---------------------------------------------------------

PRODUCT = Product(
    rows=16, columns=24, depth=8, factors="uint16", result="float32", turned_a=False,
    turned_b=True, step_a=8, step_b=8, step_c=24, step_d=24, adds=False,
    epilogue=Epilogue.BIAS, align_ab=16, align_cd=16,
)  # fmt: skip
GELU = PRODUCT._replace(epilogue=Epilogue.GELU_AUX, result="uint16")


def try_plan(product, *, edit=None, shift=0, workspace=32 << 20):
    memory = np.zeros(1 << 16, np.uint8)
    at = -(-memory.ctypes.data // 256) * 256
    plan = Plan(Library(), product, workspace, at + 4096, at + 4096)
    if not plan.algorithms:
        return plan.status
    if edit is not None:
        plan.library.set("MatmulDesc", plan._descriptor, *edit)
    places = (at + 8192, at + 16384, at + 32768, at + 32768 + shift, at + 4096)
    plan.run(*places, at + 4096, at, 0)
    return "done"


def test_a_product_that_fits_is_done():
    assert try_plan(PRODUCT) == try_plan(GELU) == "done"


@pytest.mark.parametrize(
    ("product", "status"),
    [
        (PRODUCT._replace(step_b=7), "INVALID_VALUE"),
        (PRODUCT._replace(step_d=23), "INVALID_VALUE"),
        (PRODUCT._replace(factors="float32", result="uint16"), "NOT_SUPPORTED"),
        (PRODUCT._replace(factors="float64", result="float64"), "NOT_SUPPORTED"),
        (GELU._replace(columns=20), "INVALID_VALUE"),
        (GELU._replace(result="float32"), "NOT_SUPPORTED"),
        (PRODUCT._replace(align_ab=3), "INVALID_VALUE"),
    ],
)
def test_products_that_do_not_fit_have_no_algorithm(product, status):
    assert try_plan(product) == f"CUBLAS_STATUS_{status}"


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"edit": (26, ctypes.c_int32(14))}, "NOT_SUPPORTED"),  # bias of another type
        ({"edit": (3, ctypes.c_int32(0))}, "INVALID_VALUE"),  # not the transpose
        ({"edit": (8, ctypes.c_int64(0))}, "INVALID_VALUE"),  # no bias
        ({"edit": (7, ctypes.c_uint32(1))}, "INVALID_VALUE"),  # another product
        ({"edit": (26, ctypes.c_int64(0))}, "INVALID_VALUE"),  # of another size
        ({"shift": 4}, "INVALID_VALUE"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(how, status):
    with pytest.raises(DeviceError, match=f"returned CUBLAS_STATUS_{status}"):
        try_plan(PRODUCT, **how)


def test_plain_products_that_cannot_be_had_are_an_error(monkeypatch):
    monkeypatch.setattr(Plan, "_ask", lambda plan: [])
    monkeypatch.setattr(Plan, "status", "CUBLAS_STATUS_NOT_SUPPORTED", raising=False)
    draw, ops = Drawn("bf16"), on_cpu("bf16")
    with pytest.raises(DeviceError, match="rows=4, columns=5, depth=6.*NOT_SUPPORTED"):
        ops.linear_fwd(draw(4, 6), draw(5, 6), draw(5))


# --- the library ----------------------------------------------------------------------


def test_a_heuristic_result_has_the_size_of_the_header():
    assert ctypes.sizeof(cublaslt._Algorithm) == 96


def test_a_library_that_is_not_there_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv(cublaslt.VARIABLE, str(tmp_path / "none.so"))
    cublaslt.load.cache_clear()
    with pytest.raises(DeviceError, match=r"cuda12x\[ctk\].*\n  - .*none.so"):
        cublaslt.load()


def test_the_library_of_the_cuda_of_cupy_comes_first(monkeypatch, tmp_path):
    monkeypatch.delenv(cublaslt.VARIABLE)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(
        cublaslt, "_found_by_pathfinder", lambda: "/x/libcublasLt.so.13"
    )
    for kind in ("cublas/lib/libcublasLt.so.12", "cu13/lib/libcublasLt.so.13"):
        file = tmp_path / "nvidia" / kind
        file.parent.mkdir(parents=True)
        file.touch()
    found = list(cublaslt._candidates([12, 13]))
    assert found[0] == str(tmp_path / "nvidia/cublas/lib/libcublasLt.so.12")
    assert found.index("/x/libcublasLt.so.13") < found.index(str(file))
