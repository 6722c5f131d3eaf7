"""Every CUDA kernel, run on the CPU, against the reference."""

import numpy as np
import pytest
from gpu.precisions import OPERANDS, PRECISIONS, every_name
from gpu.shim.compile import GXX, Module, ShimError, library
from numeric import assert_close
from ops_cases import CALLS, perform
from parity.build import count_valid, make_batch, make_recipe, scatter, serial_recipe

from mpipar.engine import Engine
from mpipar.grid import serial_grid
from mpipar.ops.base import Ops
from mpipar.ops.cuda.ops import CudaOps
from mpipar.ops.cuda.programs import PROGRAMS, source
from mpipar.ops.half import narrow, widen

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

# (b, s, width): a part of a warp; rows over several blocks, chunks and sums of blocks;
# rows longer than a block, and than shared memory that need not be asked for
SIZES = [(1, 1, 1), (3, 5, 6), (2, 85, 300), (2, 300, 3), (1, 2, 9000)]
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2**-8, "fp16": 2**-11}
OURS = [c for c in CALLS if getattr(CudaOps, c.op) is not getattr(Ops, c.op)]
# Those of cuBLASLt have tests of their own.
KERNELS = [c for c in OURS if c.op == "linear_db" or not c.op.startswith("linear_")]
# Goes on from what another op left, of which only both together say what it should be
KERNELS = [call for call in KERNELS if call.op != "xent_dx"]
# What may hold 16-bit numbers
HALVES = {"b", "gain", "bias", "table", "grad", "slope", "dgain", "dbias", "dtable",
          "dgate", "dup", "db", "rounded"}  # fmt: skip
ALSO = {
    "linear_fwd": {"x", "w"},
    "linear_dx": {"dy", "w"},
    "linear_dw": {"dy", "x", "dw"},
    "linear_gelu_fwd": {"x", "w"},
    "square_sum": {"x"},
    "sum_rows": {"rows", "out"},
    "linear_db": {"dy"},
}


def on_cpu(precision: str, *, backwards: bool = False, edit: tuple = ()) -> CudaOps:
    """CUDA ops run by the shim; `edit` replaces a piece of programs."""
    # Of big programs, only what is asked for is compiled.
    programs = {source(name): every_name(name) for name in PROGRAMS if name != "flash"}

    def compile_program(text, names):
        if edit and edit[0] in text:
            return Module(library(text.replace(*edit), names), names, backwards)
        names = programs.get(text, names)
        return Module(library(text, names), names, backwards)

    dtype, half = PRECISIONS[precision]
    return CudaOps(np, compile_program, dtype, half)


class Narrow:
    """A call whose arrays of weights and of gradients are 16-bit."""

    def __init__(self, call, dtype, more=frozenset()):
        self.op, self.call, self.dtype = call.op, call, np.dtype(dtype)
        self.keeps = call.keeps
        self.names = HALVES | ALSO.get(call.op, set()) | more

    def arguments(self, draw):
        given = self.call.arguments(draw)
        for name in self.names & given.keys():
            if given[name] is not None:
                empty = np.empty(given[name].shape, self.dtype)
                given[name] = narrow(given[name], empty)
        return given


class Wide:
    """The same numbers in float64, for the reference."""

    def __init__(self, call):
        self.op, self.call, self.keeps = call.op, call, call.keeps

    def arguments(self, draw):
        return {n: as_double(x) for n, x in self.call.arguments(draw).items()}


def as_double(x):
    if not isinstance(x, np.ndarray) or x.dtype.kind == "i":
        return x
    return widen(x).astype(np.float64)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("call", KERNELS, ids=str)
def test_kernels_agree_with_the_reference(call, precision):
    dtype, half = PRECISIONS[precision]
    for size in SIZES:
        own = call if half is None else Narrow(call, OPERANDS[precision])
        runs = [
            perform(on_cpu(precision, backwards=backwards), own, size, dtype)
            for backwards in (False, True)
        ]
        if half is None:
            expected = perform(Ops(dtype="float64"), call, size, "float64")
        else:
            expected = perform(Ops(dtype="float64"), Wide(own), size, "float32")
        check(call, runs, expected, TOLERANCE[precision], f"{size}")


class Shifted:
    """A call whose arrays begin one item behind where several could be read."""

    def __init__(self, call):
        self.op, self.call, self.keeps = call.op, call, call.keeps

    def arguments(self, draw):
        return {name: shifted(x) for name, x in self.call.arguments(draw).items()}


def shifted(x):
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        return x
    own = np.empty(x.size + 1, x.dtype)[1:].reshape(x.shape)
    own[...] = x
    return own


@pytest.mark.parametrize("call", KERNELS, ids=str)
def test_arrays_may_begin_anywhere(call):
    size = (2, 5, 64)
    runs = [perform(on_cpu("fp32", backwards=b), Shifted(call), size, "float32")
            for b in (False, True)]  # fmt: skip
    check(call, runs, perform(Ops(), call, size, "float64"), 1e-5, "")


# What products may be made narrow for, or from
RESULTS = {
    "gelu_fwd": {"x"}, "gelu_dx": {"dy"}, "rope": {"x"}, "swiglu_fwd": {"gate", "up"},
    "swiglu_dx": {"dy", "gate", "up"}, "layernorm_bwd": {"dy"}, "rmsnorm_bwd": {"dy"},
    "xent_fwd": {"logits"}, "combine_rows": {"rows"},
    "combine_rows_bwd": {"dy", "rows"},
}  # fmt: skip


@pytest.mark.parametrize("call", [c for c in KERNELS if c.op in RESULTS], ids=str)
def test_results_of_products_may_be_narrow(call):
    for size in [(3, 5, 6), (2, 5, 64)]:
        own = Narrow(call, np.uint16, RESULTS[call.op])
        runs = [perform(on_cpu("bf16", backwards=b), own, size, "float32")
                for b in (False, True)]  # fmt: skip
        expected = perform(Ops(), Wide(own), size, "float32")
        check(call, runs, expected, TOLERANCE["bf16"], f"{size}")


@pytest.mark.parametrize("narrows", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("width", [1, 7, 300, 1500])
def test_the_gradient_of_the_loss_is_that_of_the_reference(width, precision, narrows):
    ops, rng = on_cpu(precision), np.random.default_rng(width)
    logits = 5 * rng.standard_normal((9, width)).astype(np.float32).astype(ops.dtype)
    if narrows:
        logits = ops.operand(logits)
    local, seed = rng.integers(-2, width + 2, 9), rng.standard_normal(9)
    results = []
    for kind, z in ((ops, logits), (Ops(), as_double(logits))):
        peak, total, picked = kind.xent_fwd(z, local, lambda own: own + 1)
        dz = kind.xent_dx(z, peak, total, local, seed.astype(kind.dtype))
        results.append([as_double(x) for x in (dz, total, picked)])
    for x, exact in zip(*results, strict=True):
        assert_close(x, exact, TOLERANCE[precision])


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 6), (2, 5, 64), (1, 2, 1500)])
def test_dropout_is_that_of_the_reference(size):
    rng, (b, s, width) = np.random.default_rng(1), size
    x, onto = rng.standard_normal((2, b, s, width)).astype(np.float32)
    rows = np.arange(s)[::-1] + 2**33, np.arange(b) + 5, 2**40 + 3
    for more in (None, onto):
        given = {"rate": 0.25, "rows": rows, "key": (7, 0xFFFFFFFF), "onto": more}
        want = Ops(dtype="float32").dropout(x, **given)
        for backwards in (False, True):
            got = on_cpu("fp32", backwards=backwards).dropout(x, **given)
            assert np.allclose(got, want, rtol=1e-6, atol=0)
            assert ((got == 0) == (want == 0)).all()


def check(call, runs, expected, tolerance, size):
    """Close to the expected, and equal in both orders of threads."""
    (results, _, after), (others, _, again) = runs
    for place, (x, other, y) in enumerate(
        zip(results, others, expected[0], strict=True)
    ):
        assert_close(as_double(np.asarray(x)), y, tolerance, f"{size}: result {place}")
        assert np.array_equal(x, other), f"{size}: the order of threads matters"
    for name in after:
        if name in call.writes:
            # An operand may be made over an array, or leave it as it was.
            if as_double(after[name]).size and call.op not in ("gelu_dx", "xent_fwd"):
                assert_close(as_double(after[name]), expected[2][name], tolerance, name)
            assert np.array_equal(after[name], again[name]), name


def test_most_of_the_passes_between_products_are_kernels():
    """What the reference's array operations do is named in the docstring of CudaOps."""
    theirs = {call.op for call in CALLS} - {call.op for call in OURS}
    assert theirs == {
        "erf", "rope_table", "row_sum", "row_max",
    }  # fmt: skip


@pytest.mark.parametrize("start", [0, 3])
def test_dropout_draws_the_bits_of_the_reference(start):
    key, rows = (7, 0xFFFFFFFF), (np.arange(5)[None, :], np.arange(3)[:, None], 2**40)
    for rate in (0.1, 0.5, 0.999):
        want = Ops(dtype="float32").dropout_scale(rate, 11, rows, key, start=start)
        got = on_cpu("fp32").dropout_scale(rate, 11, rows, key, start=start)
        assert got.dtype == np.float32 and np.array_equal(got, want)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_casts_round_as_the_host_does(half):
    bits = np.random.default_rng(3).integers(0, 2**32, 4096, np.uint32)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 65519.0, 65520.0, 1e-7, 1e-40]
    x = np.concatenate([bits.view(np.float32), np.float32(special)])
    ops, dtype = on_cpu(half), np.dtype(OPERANDS[half])
    want = narrow(x, np.empty(x.shape, dtype))
    got = ops.store(x, np.empty(x.shape, dtype))
    same = got.view(np.uint16) == want.view(np.uint16)
    assert (same | np.isnan(x)).all() and np.isnan(widen(got)[np.isnan(x)]).all()
    assert np.array_equal(ops.wide(got), widen(got), equal_nan=True)
    grad, ones = got[:9].copy(), np.ones(9, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        want = narrow(widen(grad) + ones, grad.copy())
    ops.add_to(grad, ones)
    assert np.array_equal(widen(grad), widen(want), equal_nan=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_square_sum_tells_gradients_that_are_not_finite(value):
    for precision, operand in OPERANDS.items():
        x = np.zeros(1000, operand)
        assert on_cpu(precision).square_sum(x) == 0.0
        narrow(np.full(1, value, np.float32), x[777:778])
        assert not np.isfinite(on_cpu(precision).square_sum(x))


def test_arrays_that_kernels_cannot_take_are_refused():
    ops, x = on_cpu("fp32"), np.zeros((4, 6), np.float32)
    with pytest.raises(ValueError, match="gaps"):
        ops.gelu_dx(x[:, ::2], x[:, ::2])
    with pytest.raises(TypeError, match="float64"):
        ops.gelu_fwd(x.astype(np.float64), tanh=True)
    with pytest.raises(ValueError, match="uneven"):
        ops.swiglu_fwd(x[:, ::2], x[:, ::2])


def attend(ops):
    """Outputs and gradients of attention: any spans, grouped heads, strided views."""
    rng, (b, s, h) = np.random.default_rng(4), (2, 37, 33)
    fused = rng.standard_normal((b, s, 10, h)).astype(np.float32).astype(ops.dtype)
    do = rng.standard_normal((b, s, 6, h)).astype(np.float32).astype(ops.dtype)
    begin = rng.integers(0, s, (b, s))
    end = np.minimum(begin + rng.integers(0, s, (b, s)), s)
    rule = {"scale": 0.1, "spans": np.stack([begin, end, end - begin])}
    q, k, v = np.split(fused, [6, 8], axis=2)
    grads = np.zeros_like(fused)
    dq, dk, dv = np.split(grads, [6, 8], axis=2)
    o, lse = ops.attention_fwd(q, k, v, **rule)
    ops.attention_bwd(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, **rule)
    return as_double(o), np.exp(lse.astype(np.float64)), grads


def check_attention(precision, edit=()):
    runs = [on_cpu(precision, backwards=b, edit=edit) for b in (False, True)]
    results = map(attend, (*runs, Ops(dtype="float64")))
    for x, other, exact in zip(*results, strict=True):
        assert_close(x, exact, 10 * TOLERANCE[precision])
        assert np.array_equal(x, other)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_agrees_with_the_reference(precision):
    check_attention(precision)


@pytest.mark.parametrize(
    "edit",
    [
        ("__syncthreads();  // until all have done with the tiles before", ""),
        ("key < end[row]", "key <= end[row]"),
        ("int of = head * group", "int of = head * group + 1"),
    ],
)
def test_a_fault_in_attention_is_caught(edit):
    assert edit[0] in source("attention")
    with pytest.raises((AssertionError, ShimError)):
        check_attention("fp32", edit)


def train(ops, precision, family):
    """Loss and gradient norm of three steps of a whole model, GPT with dropout."""
    words = [f"train.precision={precision}", f"model.family={family}"]
    words += ["model.dropout=0.1"] * (family == "gpt")
    recipe = serial_recipe(make_recipe(1, *words))
    engine = Engine(recipe, serial_grid(), ops)
    scatter(engine)
    batch = make_batch(engine.recipe, 0)
    steps = [engine.step([batch], count_valid(batch)) for _ in range(3)]
    return np.array([[step.loss, step.grad_norm] for step in steps])


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 5e-3)]
)
def test_a_model_trains_as_the_reference_does(precision, tolerance, family):
    got = train(on_cpu(precision), precision, family)
    dtype, half = PRECISIONS[precision]
    want = train(Ops(dtype=dtype, half=half), precision, family)
    assert len(set(want[:, 0])) == 3
    assert np.allclose(got, want, rtol=tolerance, atol=0), (got, want)


# What is edited, what it becomes, and the call that must notice
REDUCED = "of_warp[i][threadIdx.x >> 5] = x[i];\n    __syncthreads();"
FAULTS = {
    "no barrier in a block's sum": (
        REDUCED, REDUCED.partition("\n")[0], "square_sum"),
    "no barrier between parts of a column": (
        "= sum;\n    __syncthreads();", "= sum;", "linear_db"),
    "a barrier that some threads do not reach": (
        "= sum;\n    __syncthreads();", "= sum;\n    if (threadIdx.x) __syncthreads(); "
        "else __syncwarp();", "linear_db"),
    "a column too far": ("C* own = y + row", "C* own = y + 1 + row", "add_residual"),
    "several items from where one access may not begin": (
        "return same ? own : -1", "return 0", "rmsnorm_fwd"),
    "items left over at the end": (
        "for (I i = high + thread; i", "for (I i = high + thread + 1; i",
        "add_residual"),
    "the gradient of another row": (
        "sums[1] += scaled[k] * own[k]", "sums[1] += scaled[k]", "layernorm_bwd"),
    "a sum that is not scaled to a larger peak": (
        "sum * exp(top - highest)", "sum", "xent_fwd"),
    "the target of another token": ("row[target]", "row[0]", "xent_fwd"),
    "a choice that is not there": (
        "places[choice] >= count", "places[choice] > count", "combine_rows"),
    "a gate of another choice": (
        "const C gate = gates[at]", "const C gate = gates[token]", "combine_rows_bwd"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_caught(fault):
    *edit, op = FAULTS[fault]
    call, size = next(c for c in OURS if c.op == op), (2, 135, 30)
    assert any(edit[0] in source(program) for program in PROGRAMS)
    expected = perform(Ops(dtype="float64"), call, size, "float64")
    with pytest.raises((AssertionError, ShimError)):
        runs = [
            perform(on_cpu("fp32", backwards=b, edit=edit), call, size, "float32")
            for b in (False, True)
        ]
        check(call, runs, expected, 1e-5, "")
