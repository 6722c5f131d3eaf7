"""Small layers of every kind, serial or cut over tp, with inputs to run them on.

Values depend on global names and indices alone, so a layer cut over tp holds the parts
of the serial one.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpipar.comm import NullCommunicator
from mpipar.config import Experts
from mpipar.layers.attention import CausalSelfAttention
from mpipar.layers.base import Chain, Layer, Step
from mpipar.layers.block import Residual
from mpipar.layers.dropout import Dropout
from mpipar.layers.embedding import Embedding, token_weight
from mpipar.layers.expert import ExpertCut
from mpipar.layers.head import Head
from mpipar.layers.loss import VocabLoss
from mpipar.layers.mlp import GeluMlp, SwigluMlp
from mpipar.layers.norm import LayerNorm, RMSNorm
from mpipar.layers.parameter import Parameter, cut
from mpipar.layers.rope import Rope
from mpipar.layers.stream import Stream
from mpipar.layers.tensor.one_d import ColumnLinear, Output, RowLinear, even_output
from mpipar.models import build_model
from mpipar.models.mixtral import mixtures
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.zero.flat import FlatState

WIDTH, HEADS, FFN, VOCAB, BATCH, CONTEXT = 8, 4, 12, 13, 2, 24
STD = {"std": 0.3, "out_std": 0.2}
RATE = 0.3


@dataclass(frozen=True)
class Case:
    """A layer, how its input and output lie on tp, and the width of its input.

    enters   "stream", "columns" (the last dim cut) or "ids"
    leaves   "stream", "columns" or "loss"
    is_packed   whether its sequences are several documents
    drops       whether it leaves out some of its work, so that costs are upper bounds
    """

    name: str
    build: Callable[..., Layer]
    enters: str = "stream"
    leaves: str = "stream"
    width: int = WIDTH
    is_model: bool = False
    is_packed: bool = False
    drops: bool = False

    def holds(self, nbytes: int, stated: int) -> bool:
        """True where a layer keeps what it states, at most that where it drops some."""
        return nbytes <= stated if self.drops else nbytes == stated

    def __str__(self) -> str:
        return self.name


def attention(kv_heads: int = HEADS, width: int = WIDTH, **options: Any) -> Callable:
    """Builds a CausalSelfAttention; rope=True gives it rotary positions."""

    def build(ops, stream):
        rope = Rope(width // HEADS, 100.0, ops=ops) if options.get("rope") else None
        chosen = {"bias": True, **options, "rope": rope}
        return CausalSelfAttention(
            "a", width, HEADS, kv_heads, ops=ops, stream=stream, **STD, **chosen
        )

    return build


def norm(kind: type, name: str = "norm") -> Callable:
    return lambda **shared: kind(name, WIDTH, eps=1e-5, **shared)


def gelu(tanh: bool, name: str = "mlp") -> Callable:
    return lambda **shared: GeluMlp(name, WIDTH, FFN, tanh=tanh, **STD, **shared)


def swiglu(**shared: Any) -> Layer:
    return SwigluMlp("mlp", WIDTH, FFN, **STD, **shared)


def mixture(kind: type = SwigluMlp, **rules: Any) -> Callable:
    """Builds a Mixture of four experts, of which a token takes two, unless said."""
    given = {"count": 4, "ffn": FFN} | rules
    section = Experts(**given)

    def build(ops: Any, stream: Stream) -> Layer:
        family = SimpleNamespace(
            stream=stream,
            ops=ops,
            model=SimpleNamespace(width=WIDTH),
            mlp=lambda name, ffn, stream, bias: kind(
                name, WIDTH, ffn, ops=ops, stream=stream, **STD, **options
            ),
        )
        return mixtures(section, ExpertCut(NullCommunicator("ep")))(family, "mlp")

    options = {"tanh": True, "bias": False} if kind is GeluMlp else {}
    return build


def dropout(rate: float) -> Callable:
    return lambda **shared: Dropout("site", rate, **shared)


def column(ops: Any, stream: Any) -> Layer:
    outputs = [even_output("y", FFN, stream.tp)]
    return ColumnLinear.build(
        outputs, WIDTH, std=0.3, bias=False, ops=ops, stream=stream
    )


def stacked(ops: Any, stream: Any) -> Layer:
    outputs = [even_output(n, rows, stream.tp) for n, rows in (("p", 8), ("q", 4))]
    outputs.append(Output("r", 4, cut(4, stream.tp.size, stream.tp.rank)))
    return ColumnLinear.build(
        outputs, WIDTH, std=0.3, bias=True, ops=ops, stream=stream
    )


def row(bias: bool) -> Callable:
    return lambda **shared: RowLinear("y", FFN, WIDTH, std=0.3, bias=bias, **shared)


def embedding(vocab: int = VOCAB, **options: Any) -> Callable:
    return lambda **shared: Embedding(
        "embedding", vocab, WIDTH, std=0.3, **options, **shared
    )


def loss(ops: Any, stream: Any, vocab: int = VOCAB) -> Layer:
    held = cut(vocab, stream.tp.size, stream.tp.rank)
    return VocabLoss(held, vocab, ops=ops, tp=stream.tp)


def head(ops: Any, stream: Any, vocab: int = VOCAB) -> Layer:
    shared = {"ops": ops, "stream": stream}
    weight = token_weight("head.weight", vocab, WIDTH, stream, 0.02)
    return Head(norm(LayerNorm)(**shared), weight, **shared)


def tied(**shared: Any) -> Layer:
    first = embedding()(**shared)
    return Chain([first, Head(norm(RMSNorm)(**shared), first.token, **shared)])


def residual(rate: float, name: str = "") -> Callable:
    return lambda **shared: Residual(
        norm(LayerNorm, f"{name}norm")(**shared),
        gelu(True, f"{name}mlp")(**shared),
        Dropout(f"{name}site", rate, **shared),
    )


def chain(**shared: Any) -> Layer:
    return Chain([residual(RATE, "0.")(**shared), residual(0.0, "1.")(**shared)])


def model(
    family: str, *, is_tied: bool, rate: float = 0.0, window: int = 0, core: Any = None
) -> Callable:
    """All units of a whole model as one chain."""
    section = SimpleNamespace(
        family=family, layers=1, width=WIDTH, heads=HEADS, kv_heads=2, ffn=FFN,
        context=CONTEXT, vocab=VOCAB, tied=is_tied, dropout=rate,
        activation="gelu_tanh", rope_theta=100.0, window=window,
        norm_eps=1e-5,
    )  # fmt: skip

    def build(ops, stream):
        sequence = stream.is_cut
        shared = {"tp": stream.tp, "sequence": sequence, "core": core}
        return Chain(build_model(section, ops=ops, **shared).units)

    return build


VOCABULARY_CASES = [
    Case("Embedding", embedding(), "ids"),
    Case("Embedding with positions", embedding(context=CONTEXT), "ids"),
    Case("Embedding with dropout", embedding(context=CONTEXT, dropout=RATE), "ids"),
    Case("Embedding in documents", embedding(context=CONTEXT), "ids", is_packed=True),
    Case("VocabLoss", loss, "columns", "loss", VOCAB),
    Case("Head", head, "stream", "loss"),
    Case("tied Embedding and Head", tied, "ids", "loss"),
]
CASES = [
    Case("LayerNorm", norm(LayerNorm)),
    Case("RMSNorm", norm(RMSNorm)),
    Case("ColumnLinear", column, "stream", "columns"),
    Case("stacked ColumnLinear", stacked, "stream", "columns"),
    Case("RowLinear", row(True), "columns", "stream", FFN),
    Case("RowLinear without bias", row(False), "columns", "stream", FFN),
    Case("Dropout", dropout(RATE)),
    Case("attention", attention()),
    Case("attention 2 kv heads", attention(2, 16, rope=True, bias=False), width=16),
    Case("attention 1 kv head", attention(1)),
    Case("attention 1 kv head with dropout", attention(1, dropout=RATE)),
    Case("attention with dropout", attention(dropout=RATE)),
    Case("attention with a window", attention(2, window=3)),
    Case("attention in documents", attention(2, rope=True, dropout=RATE, window=4),
         is_packed=True),
    Case("GeluMlp tanh", gelu(True)),
    Case("GeluMlp erf", gelu(False)),
    Case("SwigluMlp", swiglu),
    Case("Mixture", mixture()),
    Case("Mixture of GeluMlps with a shared one",
         mixture(GeluMlp, router="softmax", active=1, shared=2)),
    Case("Mixture by sigmoids in groups",
         mixture(router="sigmoid", count=6, groups=3, active_groups=2, scale=2.5)),
    Case("Mixture with a capacity",
         mixture(router="softmax", active=3, capacity=0.5), drops=True),
    Case("Residual", residual(0.0)),
    Case("Residual with dropout", residual(RATE)),
    Case("Chain", chain),
    Case("gpt", model("gpt", is_tied=True), "ids", "loss",
         is_model=True),
    Case("llama", model("llama", is_tied=False, rate=RATE), "ids", "loss",
         is_model=True),
    *VOCABULARY_CASES,
]  # fmt: skip


class Made:
    """A case built on this rank of tp, its parameters bound and filled."""

    def __init__(
        self, case: Case, tp: Any, s: int, *, sequence: bool = False, ops: Any = None
    ) -> None:
        self.case, self.stream = case, Stream(tp, sequence=sequence)
        self.ops = ops or NumpyOps("float64")
        self.layer = case.build(ops=self.ops, stream=self.stream)
        unique = {id(p): p for p in self.layer.parameters()}.values()
        self.flat = FlatState([list(unique)], self.ops)
        for p in unique:
            box = tuple(slice(*interval) for interval in p.box)
            p.data[...] = values(p)[box]
        self.s = s
        self.step = make_step(s, **(documents(s) if case.is_packed else {}))

    def x(self, number: int = 0) -> np.ndarray:
        """The whole input of micro-batch `number`."""
        rng = np.random.default_rng([7, number])
        if self.case.enters == "ids":
            return rng.integers(0, VOCAB, (BATCH, self.s))
        return rng.standard_normal((BATCH, self.s, self.case.width))

    def part(self, layout: str, x: np.ndarray) -> np.ndarray:
        """This rank's part of the serial layer's array, as a new one."""
        if layout == "columns":
            x = x[..., columns(self.layer)]
        elif layout == "stream" and self.stream.is_cut:
            tp = self.stream.tp
            x = x[:, slice(*cut(self.s, tp.size, tp.rank))]
        return x.copy(order="C")


class Spy(NumpyOps):
    """Notes the dropout factors of all probabilities that attention is given."""

    factors: np.ndarray | None = None

    def attention_fwd(self, q, *rest, dropout=None, **options):
        b, s, n, _ = q.shape
        whole = [slice(0, size) for size in (b, n, s, s)]
        self.factors = dropout and dropout(*whole)
        return super().attention_fwd(q, *rest, dropout=dropout, **options)


def columns(layer: Layer) -> np.ndarray:
    """Which columns of the serial layer's cut array this rank holds."""
    if isinstance(layer, VocabLoss):
        return np.arange(*layer.held)
    if isinstance(layer, RowLinear):
        return np.arange(*layer.weight.box[1])
    found, offset = [], 0
    for p in layer.weight.parts:
        found.append(offset + np.arange(*p.box[0]))
        offset += p.shape[0]
    return np.concatenate(found)


def values(p: Parameter) -> np.ndarray:
    """Values of the whole parameter; gains lie around 1."""
    rng = np.random.default_rng(zlib.crc32(p.name.encode()))
    return (p.init == "ones") + 0.3 * rng.standard_normal(p.shape)


def upstream(y: Any, number: int = 0) -> np.ndarray | None:
    """A gradient for output y; None for a loss, whose gradient is its own."""
    if isinstance(y, float):
        return None
    return np.random.default_rng([9, number]).standard_normal(y.shape)


def make_step(s: int, **options: Any) -> Step:
    """A micro-batch with labels, of which every fifth is missing."""
    labels = np.random.default_rng(s).integers(0, VOCAB, (BATCH, s))
    labels.reshape(-1)[::5] = -100
    chosen = {"samples": np.array([3, 8]), "labels": labels, "number": 2, "seed": 11}
    chosen |= {"valid": int((labels >= 0).sum()), "positions": np.arange(s)}
    return Step(**chosen | options)


def documents(s: int) -> dict[str, np.ndarray]:
    """Where the documents of each sequence begin, and places that begin there anew."""
    firsts = np.zeros((BATCH, s), np.int64)
    for sequence, begins in enumerate(([s // 3, s // 2], [2 * s // 3])):
        for begin in begins:
            firsts[sequence, begin:] = begin
    return {"firsts": firsts, "places": np.arange(s) - firsts}


def arrays(kept: Any) -> Iterator[np.ndarray]:
    """Every array in what a layer keeps."""
    if isinstance(kept, np.ndarray):
        yield kept
    elif isinstance(kept, (list, tuple)):
        for item in kept:
            yield from arrays(item)
    elif hasattr(kept, "__slots__") and not isinstance(kept, Step):
        for name in kept.__slots__:
            yield from arrays(getattr(kept, name))
