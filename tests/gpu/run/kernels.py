"""How near kernels come to the device's limits: bytes moved, FLOP/s of products."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gpu.run.attention import roads
from gpu.run.record import Records, Setting
from gpu.run.timing import copy_rate, normal, seconds

from mpipar.ops import make_ops

# Tokens, widths and vocabulary that passes are timed with
REAL = {"tokens": 16384, "width": 4096, "vocab": 50304, "weights": 1 << 28}
TINY = {"tokens": 8, "width": 48, "vocab": 64, "weights": 1 << 10}
# y = x Wᵀ: name, tokens, d, f
PRODUCTS = [
    ("124m qkv", 65536, 768, 2304),
    ("124m up", 65536, 768, 3072),
    ("124m down", 65536, 3072, 768),
    ("124m head", 65536, 768, 50304),
    ("1.5b qkv", 16384, 1600, 4800),
    ("1.5b up", 16384, 1600, 6400),
    ("8b qkv", 16384, 4096, 6144),
    ("8b gate up", 16384, 4096, 28672),
    ("8b down", 16384, 14336, 4096),
]
# b, s, n, g, h
ATTENTION = [(16, 1024, 12, 12, 64), (16, 1024, 25, 25, 64), (2, 8192, 32, 8, 128)]


def run(setting: Setting, records: Records) -> None:
    """Each in a check of its own: what fails leaves the others."""
    ops = make_ops("cuda", "bf16")
    rate = copy_rate(ops, setting.choose(1 << 30, 1 << 20))
    for road, own in roads("bf16"):
        for shape in setting.choose(ATTENTION, [(1, 16, 4, 2, 16)]) if road else ():
            name = f"attention {shape}{road}"
            records.check(name, _attention(own, records, name, shape))
    for name, *sizes in setting.choose(PRODUCTS, [("tiny", 8, 16, 24)]):
        records.check(f"products {name}", _products(ops, records, name, *sizes))
    for name, prepare in PASSES.items():
        act = _pass(ops, records, name, prepare, setting.choose(REAL, TINY), rate)
        records.check(name, act)
        if setting.left <= 0:
            return


def _pass(
    ops: Any, records: Records, name: str, prepare: Callable, sizes: dict, rate: float
) -> Callable[[], None]:
    """GB/s of the bytes that a pass has to move, and their share of a copy's."""

    def act() -> None:
        moved, work = prepare(ops, **sizes)
        found = moved / seconds(ops, work)
        records.figure(name, found / 1e9, "GB/s", of_copy=found / rate)

    return act


def _bytes(*arrays: Any) -> int:
    return sum(x.nbytes for x in arrays)


def _norm(ops: Any, kind: str, tokens: int, width: int, **_: Any) -> tuple:
    x, gain, bias = normal(ops, (tokens, width)), ops.zeros((width,)), None
    if kind == "layernorm":
        bias = ops.zeros((width,))
        return (
            x.nbytes + x.size * ops.operand_dtype.itemsize,
            lambda: ops.layernorm_fwd(x, gain, bias, eps=1e-5),
        )
    return x.nbytes + x.size * ops.operand_dtype.itemsize, lambda: ops.rmsnorm_fwd(
        x, gain, eps=1e-5
    )


def _norm_bwd(ops: Any, kind: str, tokens: int, width: int, **_: Any) -> tuple:
    x, dy = (normal(ops, (tokens, width), seed=seed) for seed in (1, 2))
    gain, dgain, dbias = (ops.zeros((width,)) for _ in "123")
    stats = ops.zeros((tokens,)) + ops.dtype.type(1)
    if kind == "layernorm":
        return 3 * x.nbytes, lambda: ops.layernorm_bwd(
            dy, x, stats, stats, gain, dgain=dgain, dbias=dbias
        )
    return 3 * x.nbytes, lambda: ops.rmsnorm_bwd(dy, x, stats, gain, dgain=dgain)


def _adamw(ops: Any, weights: int, **_: Any) -> tuple:
    weight, m = (normal(ops, (weights,), seed=seed) for seed in (1, 2))
    v, grad = ops.zeros((weights,)), normal(ops, (weights,), ops.operand_dtype)
    rule = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}
    return 2 * _bytes(weight, m, v) + grad.nbytes, lambda: ops.adamw(
        weight, grad, m, v, step=3, scale=1.0, **rule
    )


def _square_sum(ops: Any, weights: int, **_: Any) -> tuple:
    grad = normal(ops, (weights,), ops.operand_dtype)
    return grad.nbytes, lambda: ops.square_sum(grad)


def _cast(ops: Any, weights: int, **_: Any) -> tuple:
    x, y = normal(ops, (weights,)), ops.empty_operand((weights,))
    return _bytes(x, y), lambda: ops.store(x, y)


def _swiglu(ops: Any, tokens: int, width: int, **_: Any) -> tuple:
    kind = ops.operand_dtype if ops.narrow_results else ops.dtype
    both = normal(ops, (tokens, 2 * width), kind)
    gate, up = both[:, :width], both[:, width:]
    moved = both.nbytes + tokens * width * ops.operand_dtype.itemsize
    return moved, lambda: ops.swiglu_fwd(gate, up)


def _embedding(ops: Any, tokens: int, width: int, vocab: int, **_: Any) -> tuple:
    ids = ops.asarray(np.random.default_rng(0).integers(0, vocab, (1, tokens)))
    table = normal(ops, (vocab, width), ops.operand_dtype)
    moved = tokens * width * (table.itemsize + ops.dtype.itemsize)
    return moved, lambda: ops.embedding_fwd(ids, table)


PASSES: dict[str, Callable] = {
    "layernorm forward": lambda ops, **n: _norm(ops, "layernorm", **n),
    "rmsnorm forward": lambda ops, **n: _norm(ops, "rmsnorm", **n),
    "layernorm backward": lambda ops, **n: _norm_bwd(ops, "layernorm", **n),
    "rmsnorm backward": lambda ops, **n: _norm_bwd(ops, "rmsnorm", **n),
    "adamw": _adamw,
    "square sum": _square_sum,
    "cast to 16 bits": _cast,
    "swiglu forward": _swiglu,
    "embedding": _embedding,
}


def _products(
    ops: Any, records: Records, name: str, tokens: int, d: int, f: int
) -> Callable[[], None]:
    """TFLOP/s of y = x Wᵀ, of its input gradient and of its weight gradient."""

    def act() -> None:
        half = ops.operand_dtype
        x, w = normal(ops, (tokens, d), half), normal(ops, (f, d), half, seed=1)
        dy, dw = normal(ops, (tokens, f), half), ops.xp.zeros((f, d), half)
        for kind, work in (
            ("y", lambda: ops.linear_fwd(x, w, narrow=True)),
            ("dx", lambda: ops.linear_dx(dy, w, narrow=True)),
            ("dw", lambda: ops.linear_dw(dy, x, dw)),
        ):
            rate = 2 * tokens * d * f / seconds(ops, work, repeats=5)
            records.figure(f"{name} {kind}", rate / 1e12, "TFLOP/s")

    return act


def _attention(
    ops: Any, records: Records, name: str, shape: tuple
) -> Callable[[], None]:
    """TFLOP/s of causal attention: half of all pairs, 4 h FLOP each; backward 2.5 ×."""

    def act() -> None:
        (b, s, n, g, h) = shape
        kind = ops.operand_dtype if ops.narrow_results else ops.dtype
        heads = normal(ops, (b, s, n + 2 * g, h), kind)
        grads = ops.xp.zeros_like(heads)
        (q, k, v), (dq, dk, dv) = (list(_split(x, n, g)) for x in (heads, grads))
        end = np.arange(1, s + 1)[None]
        rule = {"scale": h**-0.5, "spans": np.stack([0 * end, end, end])}
        o, lse = ops.attention_fwd(q, k, v, **rule)
        do, flops = ops.zeros(o.shape), 2 * b * n * s * (s + 1) * h
        for word, factor, work in (
            ("forward", 1.0, lambda: ops.attention_fwd(q, k, v, **rule)),
            ("backward", 2.5, lambda: ops.attention_bwd(
                do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, **rule)),
        ):  # fmt: skip
            rate = factor * flops / seconds(ops, work, repeats=5)
            records.figure(f"{name} {word}", rate / 1e12, "TFLOP/s")

    return act


def _split(x: Any, n: int, g: int) -> Iterator[Any]:
    """Query, key and value heads of a joined array."""
    yield from (x[:, :, :n], x[:, :, n : n + g], x[:, :, n + g :])
