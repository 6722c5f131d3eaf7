"""Every operation in every precision against the reference in fp64 on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gpu.precisions import OPERANDS, PRECISIONS
from gpu.run.record import Records, Setting
from gpu.test_kernels import SIZES, TOLERANCE, Narrow, Wide, as_double
from numeric import Draw
from ops_cases import CALLS

from mpipar.ops import Ops, make_ops

# (b, s, width) of real models: of GPT-2, of Llama, a row of logits
REAL = [(2, 128, 768), (1, 40, 4096), (1, 3, 50304)]
POISON_BYTES = 64 << 20
# Products of 16-bit operands: the fp64 reference has operands that are not rounded.
PRODUCTS = ("linear", "gelu", "swiglu")
SLACK = 4.0
# Numbers are new each time: the largest may be one that is rounded by most.
ROUNDINGS = 2.0
# Written over or left as it was, as the docstring says
OVER = ("gelu_dx", "xent_fwd")
# What they hand on from forward to backward is their own: they are tried together.
OWN = ("xent_dx",)


def run(setting: Setting, records: Records) -> None:
    """A check for each operation and precision, with the largest error of all sizes."""
    exact = Ops(dtype="float64")
    sizes = setting.choose([*SIZES, *REAL], [(3, 5, 6)])
    calls = [call for call in CALLS if call.op not in OWN]
    calls = setting.choose(calls, calls[::6])
    for precision in setting.choose(PRECISIONS, ["fp32", "bf16"]):
        ops = make_ops("cuda", precision)
        for call in calls:
            name = f"{call} {precision}"
            records.check(name, worst_of(ops, exact, call, precision, sizes), 1.0)
            if setting.left <= 0:
                return
        width = setting.choose(50257, 24)
        act = partial(loss_error, ops, exact, precision, width)
        records.check(f"gradient of the loss {precision}", act, 1.0)


def worst_of(
    ops: Any, exact: Ops, call: Any, precision: str, sizes: list
) -> Callable[[], float]:
    """The largest error, as a multiple of what is allowed."""
    slack = SLACK if call.op.startswith(PRODUCTS) else ROUNDINGS
    tolerance = slack * TOLERANCE[precision]

    def worst() -> float:
        errors = [_error(ops, exact, call, precision, size) for size in sizes]
        return float(np.max(errors)) / tolerance

    return worst


def loss_error(ops: Any, exact: Ops, precision: str, width: int) -> float:
    """The largest error of sums and of dlogits, as a multiple of what is allowed."""
    draw = np.random.default_rng()
    logits = (5 * draw.standard_normal((40, width))).astype(ops.dtype)
    local, seed = draw.integers(-2, width + 2, 40), draw.standard_normal(40)
    results = []
    for kind in (ops, exact):
        z = kind.asarray(logits.astype(kind.dtype))
        target, own = kind.asarray(local), kind.asarray(seed.astype(kind.dtype))
        peak, total, picked = kind.xent_fwd(z, target, lambda peak: peak + 1)
        results.append((kind.xent_dx(z, peak, total, target, own), total, picked))
    worst = max(_distance(ops, *pair) for pair in zip(*results, strict=True))
    return worst / (SLACK * TOLERANCE[precision])


def _error(ops: Any, exact: Ops, call: Any, precision: str, size: tuple) -> float:
    """Of all results and of all arrays that are written, relative to their largest."""
    half = PRECISIONS[precision][1]
    own = Narrow(call, OPERANDS[precision]) if half else call
    seed = np.random.default_rng().integers(2**31)
    given = own.arguments(_draw("float64" if half is None else ops.dtype, size, seed))
    wide = Wide(own).arguments(_draw("float64", size, seed))
    if half is None:
        given = {name: _cast(x, ops.dtype) for name, x in given.items()}
    _poison(ops)
    held = on_device(ops, given)
    got = getattr(ops, call.op)(**held)
    want = getattr(exact, call.op)(**wide)
    pairs = list(zip(_list(got), _list(want), strict=True))
    # What is kept is in a form of its own; `products` takes it on.
    pairs = pairs[:1] if call.keeps else pairs
    if call.op not in OVER:
        pairs += [(held[name], wide[name]) for name in call.writes]
    return max((_distance(ops, x, y) for x, y in pairs), default=0.0)


def _draw(dtype: Any, size: tuple, seed: int) -> Draw:
    """Fresh numbers, the same for both sides."""
    draw = Draw(np.dtype(dtype), size)
    draw.rng = np.random.default_rng(seed)
    return draw


def _cast(x: Any, dtype: np.dtype) -> Any:
    """Numbers of the compute type; a view of a larger array stays one."""
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f" or x.dtype == dtype:
        return x
    if x.base is None or x.base.ndim != x.ndim:
        return x.astype(dtype)
    return x.base.astype(dtype)[_window(x)]


def _window(x: np.ndarray) -> tuple[slice, ...]:
    """Where a view that skips nothing lies in its base of as many dims."""
    place = (x.ctypes.data - x.base.ctypes.data) // x.itemsize
    index = []
    for length, stride in zip(x.shape, x.base.strides, strict=True):
        first, place = divmod(place, stride // x.itemsize)
        index.append(slice(first, first + length))
    return tuple(index)


def on_device(ops: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on the device; views of one array stay that."""
    bases: dict[int, Any] = {}

    def move(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind == "i":
            return x if not isinstance(x, np.ndarray) else ops.asarray(x)
        if x.base is None or x.base.ndim != x.ndim or x.size == 0:
            return ops.asarray(np.ascontiguousarray(x))
        if id(x.base) not in bases:
            bases[id(x.base)] = ops.asarray(np.ascontiguousarray(x.base))
        return bases[id(x.base)][_window(x)]

    return {name: move(x) for name, x in given.items()}


def _poison(ops: Any) -> None:
    """Memory that is handed out next holds NaN, in every type."""
    ops.xp.full(POISON_BYTES, 0xFF, ops.xp.uint8)


def _list(result: Any) -> list[Any]:
    results = result if isinstance(result, tuple) else (result,)
    return [x for x in results if x is not None]


def _distance(ops: Any, x: Any, y: Any) -> float:
    x = as_double(np.asarray(ops.to_host(x) if hasattr(x, "dtype") else x))
    y = as_double(np.asarray(y))
    if x.shape != y.shape:
        raise AssertionError(f"shapes {x.shape} and {y.shape}")
    if y.size == 0:
        return 0.0
    error = np.abs(x - y).max() / (np.abs(y).max() or 1.0)
    return float("inf") if np.isnan(error) else float(error)
