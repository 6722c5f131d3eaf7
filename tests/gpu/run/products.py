"""Dense products of real and of odd shapes against fp64 on the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gpu.run.record import Records, Setting
from gpu.test_kernels import TOLERANCE, as_double

from mpipar.ops import Ops, make_ops
from mpipar.ops.half import narrow

# name: tokens, d, f of y = x Wᵀ
REAL = {
    "124m up": (512, 768, 3072),
    "124m down": (512, 3072, 768),
    "1.5b qkv": (300, 1600, 4800),
    "8b gate up": (128, 4096, 28672),
    "head": (200, 768, 50257),
    "odd": (7, 33, 65),
    "one of each": (1, 1, 1),
    "a long row": (3, 9000, 5),
}
TINY = {"odd": (7, 33, 65), "even": (16, 24, 40)}
# A result and what it is added to are rounded; of GELU also what is kept of it
SLACK, GELU_SLACK = 2.0, 4.0


def run(setting: Setting, records: Records) -> None:
    """Each shape in each precision, of arrays with gaps between their rows too."""
    precisions = ["bf16", "fp32", "fp16", "fp64"]
    for precision in setting.choose(precisions, precisions[:2]):
        ops = make_ops("cuda", precision)
        once = TOLERANCE[precision]
        for name, sizes in setting.choose(REAL, TINY).items():
            label = f"{name} {sizes} {precision}"
            records.check(label, _products(ops, *sizes), SLACK * once)
            for form in ("tanh", "erf"):
                act = _gelu(ops, *sizes, tanh=form == "tanh")
                records.check(f"gelu {form} {label}", act, GELU_SLACK * once)
            if setting.left <= 0:
                return


def _operand(ops: Any, *shape: int) -> np.ndarray:
    """Fresh numbers of the operand type."""
    x = np.random.default_rng().standard_normal(shape, np.float32)
    if ops.is_mixed:
        return narrow(x, np.empty(shape, ops.operand_dtype))
    return x.astype(ops.dtype)


def _products(ops: Any, tokens: int, d: int, f: int) -> Callable[[], float]:
    """y with a bias and onto a residual, dx, and dw added up twice."""

    def act() -> float:
        # A view of a joined array, as q of q k v is
        joined, w, b = (_operand(ops, *s) for s in ((tokens, d + 8), (f, d), (f,)))
        dy = _operand(ops, tokens, f)
        onto = np.random.default_rng().standard_normal((tokens, f)).astype(ops.dtype)
        results = []
        for side in (ops, Ops()):
            own = [
                side.asarray(x if side is ops else as_double(x))
                for x in (joined, w, b, dy, onto)
            ]
            results.append(_of_side(side, *own, d))
        return _apart(ops, *results)

    return act


def _of_side(
    ops: Any, joined: Any, w: Any, b: Any, dy: Any, onto: Any, d: int
) -> list[Any]:
    x = joined[:, 8:]
    dw = ops.xp.zeros((w.shape[0], d), ops.dtype)
    half = ops.xp.zeros((w.shape[0], d), ops.operand_dtype)
    for grad in (dw, dw, half):
        ops.linear_dw(dy, x, grad)
    return [
        ops.linear_fwd(x, w),
        ops.linear_fwd(x, w, b, narrow=True),
        ops.linear_fwd(x, w, b, onto),
        ops.linear_dx(dy, w),
        ops.linear_dx(dy, w, narrow=True),
        dw,
        half,
    ]


def _gelu(ops: Any, tokens: int, d: int, f: int, *, tanh: bool) -> Callable[[], float]:
    """GELU of a product, and its gradient through what the forward kept."""

    def act() -> float:
        shapes = (tokens, d), (f, d), (f,), (tokens, d), (d, f)
        given = [_operand(ops, *shape) for shape in shapes]
        # Sums of about the size of one, where GELU bends
        for x in (given[1], given[4]):
            small = as_double(x) * d**-0.5
            x[...] = narrow(small.astype(np.float32), x) if ops.is_mixed else small
        results = []
        for side in (ops, Ops()):
            x, w, b, dy, down = (
                side.asarray(g if side is ops else as_double(g)) for g in given
            )
            y, kept = side.linear_gelu_fwd(x, w, b, tanh=tanh)
            results.append([y, side.linear_gelu_dx(dy, down, kept, tanh=tanh)])
        return _apart(ops, *results)

    return act


def _apart(ops: Any, got: list, want: list) -> float:
    """The largest difference, relative to the largest number of each result."""
    errors = []
    for x, y in zip(got, want, strict=True):
        difference = np.abs(as_double(ops.to_host(x)) - y).max()
        errors.append(difference / (np.abs(y).max() or 1.0))
    return float(np.max(errors))
