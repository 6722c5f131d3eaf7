"""Attention of real shapes, dropout and starting weights, against the reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu.run.record import Records, Setting
from gpu.test_kernels import TOLERANCE, as_double

from mpipar.errors import DeviceError
from mpipar.ops import Ops, make_ops
from mpipar.ops.half import narrow

# Softmax and two products, each of rounded numbers
SLACK = 4.0


@dataclass(frozen=True)
class Shape:
    """b sequences of s positions, n query and g key/value heads of width h."""

    b: int
    s: int
    n: int
    g: int
    h: int
    window: int = 0

    def __str__(self) -> str:
        near = f" window {self.window}" if self.window else ""
        return f"b{self.b} s{self.s} n{self.n} g{self.g} h{self.h}{near}"


REAL = [
    Shape(2, 1024, 12, 12, 64),
    Shape(1, 1024, 25, 25, 64),
    Shape(1, 1024, 32, 8, 128),
    Shape(2, 333, 4, 2, 80, window=100),
    Shape(3, 1, 2, 1, 64),
]
TINY = [Shape(1, 37, 4, 2, 16, window=9)]


def run(setting: Setting, records: Records) -> None:
    """Precisions with products on tensor cores first."""
    for precision in setting.choose(["bf16", "fp32", "fp16", "fp64"], ["bf16", "fp32"]):
        ops = make_ops("cuda", precision)
        limit = SLACK * TOLERANCE[precision]
        for road, own in roads(precision):
            for shape in setting.choose(REAL, TINY):
                act = _attention(own, shape)
                records.check(f"attention {shape} {precision}{road}", act, limit)
        records.check(f"dropout draws {precision}", _dropout(ops), 0.0)
        records.check(f"starting weights {precision}", _weights(ops), 1e-6)
        if setting.left <= 0:
            return


def roads(precision: str) -> Iterator[tuple[str, Any]]:
    """Name and ops of each way to compute attention that is there, the chosen one
    first; 16-bit numbers have several."""
    yield "", make_ops("cuda", precision)
    for name in ("cudnn", "flash") if precision in ("bf16", "fp16") else ():
        try:
            yield f" by {name}", make_ops("cuda", precision, attention=name)
        except DeviceError as error:
            print(f"attention by {name}: {error}")


def _attention(ops: Any, shape: Shape) -> Callable[[], float]:
    """The largest relative error of o and all gradients, in views of one array."""

    def act() -> float:
        rng = np.random.default_rng()
        b, s, n, g, h = shape.b, shape.s, shape.n, shape.g, shape.h
        fused = rng.standard_normal((b, s, n + 2 * g, h), np.float32)
        do = rng.standard_normal((b, s, n, h), np.float32)
        if ops.narrow_results:
            fused = narrow(fused, np.empty(fused.shape, ops.operand_dtype))
        else:
            fused = fused.astype(ops.dtype)
        end = np.arange(1, s + 1)[None]
        begin = np.maximum(end - (shape.window or s), 0)
        rule = {"scale": h**-0.5, "spans": np.stack([begin, end, end - begin])}
        heads = ops.asarray(fused)
        got = _both(ops, heads, ops.asarray(do.astype(ops.dtype)), n, g, rule)
        exact = Ops(dtype="float64")
        want = _both(exact, as_double(fused), do.astype(np.float64), n, g, rule)
        errors = [
            np.abs(as_double(ops.to_host(x)) - y).max() / (np.abs(y).max() or 1.0)
            for x, y in zip(got, want, strict=True)
        ]
        return float(np.max(errors))

    return act


def _both(ops: Any, fused: Any, do: Any, n: int, g: int, rule: dict) -> list[Any]:
    """o and the gradients of q, k and v."""
    q, k, v = fused[:, :, :n], fused[:, :, n : n + g], fused[:, :, n + g :]
    grads = ops.xp.zeros_like(fused)
    dq, dk, dv = grads[:, :, :n], grads[:, :, n : n + g], grads[:, :, n + g :]
    o, lse = ops.attention_fwd(q, k, v, **rule)
    ops.attention_bwd(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, **rule)
    return [o, dq, dk, dv]


def _dropout(ops: Any) -> Callable[[], float]:
    """How many factors differ from those of the CPU."""

    def act() -> float:
        key, rows = (
            (7, 0xFFFFFFFF),
            (np.arange(50)[:, None], np.arange(30)[None], 2**40),
        )
        want = Ops(dtype=ops.dtype.name).dropout_scale(0.1, 101, rows, key, start=3)
        there = tuple(ops.asarray(r) if isinstance(r, np.ndarray) else r for r in rows)
        got = ops.to_host(ops.dropout_scale(0.1, 101, there, key, start=3))
        return float((got != want).sum())

    return act


def _weights(ops: Any) -> Callable[[], float]:
    """The largest difference of weights drawn here and on the CPU."""

    def act() -> float:
        shape, box = (1000, 1000), ((0, 1000), (500, 1000))
        rule = {"std": 1.0, "seed": 3, "name": "w", "shape": shape, "box": box}
        got, want = ops.empty((1000, 500)), np.empty((1000, 500), ops.dtype)
        ops.fill_normal(got, **rule)
        Ops(dtype=ops.dtype.name).fill_normal(want, **rule)
        return float(np.abs(ops.to_host(got) - want).max())

    return act
