"""Calls of every array operation, for tests of its implementations."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numeric import Draw

ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1, "scale": 0.5}


@dataclass(frozen=True)
class Call:
    """An operation, its arguments, and those that its docstring says it writes.

    keeps   its second result is for another op of the same kind, in a form of its own
    """

    op: str
    arguments: Callable[[Draw], dict]
    writes: tuple[str, ...] = ()
    label: str = ""
    keeps: bool = False

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


def higher(own):
    """Peaks over all ranks' columns, in the same array."""
    own += 1
    return own


def loss_rows(draw):
    tokens = draw.b * draw.s
    logits = draw(tokens, draw.width)
    local = draw.ids(-2, draw.width + 2).reshape(-1)
    return {"logits": logits, "local": local, "join": higher}


def loss_grads(draw):
    tokens = draw.b * draw.s
    local = draw.ids(-2, draw.width + 2).reshape(-1)
    e = np.exp(draw(tokens, draw.width))
    return {"e": e, "peak": draw(tokens), "total": e.sum(-1) + 1, "local": local,
            "seed": draw(tokens)}  # fmt: skip


def losses_of_tokens(draw):
    total, target = np.abs(draw(2, draw.b * draw.s)) + draw.dtype.type(0.5)
    return {"total": total, "target": target, "labels": draw.ids(-2, 3).reshape(-1)}


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
    Call("linear_fwd", lambda d: {"x": d.rows(3), "w": d(d.width, 3), "b": d(d.width),
                                  "narrow": True}, label="linear_fwd narrow"),
    Call("add_residual", lambda d: {"y": d.rows(), "b": d(d.width), "onto": d.rows()},
         ("y",)),
    Call("add_residual", lambda d: {"y": d.rows(), "b": None, "onto": d.rows()},
         ("y",), "add_residual, no bias"),
    Call("linear_dx", lambda d: {"dy": d.rows(), "w": d(d.width, 3)}),
    Call("linear_dx", lambda d: {"dy": d.rows(), "w": d(d.width, 3), "narrow": True},
         label="linear_dx narrow"),
    Call("linear_dw", lambda d: {"dy": d.rows(), "x": d.rows(3), "dw": d(d.width, 3)},
         ("dw",)),
    Call("linear_db", lambda d: {"dy": d.rows(), "db": d(d.width)}, ("db",)),
    Call("linear_gelu_fwd", lambda d: {"x": d.rows(3), "w": d(d.width, 3),
                                       "b": d(d.width), "tanh": True}, keeps=True),
    Call("linear_gelu_fwd", lambda d: {"x": d.rows(3), "w": d(d.width, 3), "b": None,
                                       "tanh": False}, keeps=True,
         label="linear_gelu_fwd erf"),
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
    Call("sum_rows", lambda d: {"rows": d(3, d.width), "out": d(d.width)}, ("out",)),
    Call("loss_sum", losses_of_tokens),
    Call("square_sum", lambda d: {"x": d(d.b * d.s * d.width)}),
    Call("adamw", adam, ("weight", "m", "v")),
    Call("adamw", lambda d: adam(d, decay=0.0), ("weight", "m", "v"), "adamw no decay"),
    Call("adamw", lambda d: adam(d, rounded=d(d.b * d.s * d.width)),
         ("weight", "m", "v", "rounded"), "adamw, rounded too"),
]  # fmt: skip


def perform(ops, call, size, dtype):
    """Results of a call, and its arguments before and after."""
    before, after = (call.arguments(Draw(np.dtype(dtype), size)) for _ in "12")
    result = getattr(ops, call.op)(**after)
    results = result if isinstance(result, tuple) else (result,)
    results = results[:1] if call.keeps else results
    return [r for r in results if r is not None], before, after
