"""GPT-2: LayerNorm, learned positions, GELU, biases (Radford et al. 2019)."""

from typing import Any

from mpipar.layers.attention import CausalSelfAttention
from mpipar.layers.base import Chain
from mpipar.layers.embedding import Embedding
from mpipar.layers.mlp import GeluMlp
from mpipar.layers.model import Model
from mpipar.layers.norm import LayerNorm
from mpipar.layers.stream import Stream
from mpipar.models.parts import STD, out_std, pre_norm_block, with_head
from mpipar.ops import Ops


def build(model: Any, *, ops: Ops, tp: Any, sequence: bool) -> Model:
    """Embedding, `model.layers` blocks and head of a GPT."""
    stream = Stream(tp, sequence=sequence)
    shared = {"ops": ops, "stream": stream}
    embedding = Embedding(
        "embedding",
        model.vocab,
        model.width,
        std=STD,
        context=model.context,
        dropout=model.dropout,
        **shared,
    )
    blocks = [_block(f"blocks.{i}", model, shared) for i in range(model.layers)]
    return with_head(model, embedding, blocks, LayerNorm, shared)


def _block(name: str, model: Any, shared: dict[str, Any]) -> Chain:
    std = {"std": STD, "out_std": out_std(model.layers)}
    attention = CausalSelfAttention(
        f"{name}.attention",
        model.width,
        model.heads,
        model.kv_heads,
        bias=True,
        dropout=model.dropout,
        **std,
        **shared,
    )
    tanh = model.activation == "gelu_tanh"
    mlp = GeluMlp(f"{name}.mlp", model.width, model.ffn, tanh=tanh, **std, **shared)
    return pre_norm_block(name, model, LayerNorm, attention, mlp, shared)
