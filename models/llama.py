"""Llama: RMSNorm, rotary positions, SwiGLU, grouped queries, no biases
(Touvron et al. 2023)."""

from typing import Any

from mpipar.layers.attention import CausalSelfAttention
from mpipar.layers.base import Chain
from mpipar.layers.embedding import Embedding
from mpipar.layers.mlp import SwigluMlp
from mpipar.layers.model import Model
from mpipar.layers.norm import RMSNorm
from mpipar.layers.rope import Rope
from mpipar.layers.stream import Stream
from mpipar.models.parts import STD, out_std, pre_norm_block, with_head
from mpipar.ops import Ops


def build(model: Any, *, ops: Ops, tp: Any, sequence: bool) -> Model:
    """Embedding, `model.layers` blocks and head of a Llama."""
    stream = Stream(tp, sequence=sequence)
    shared = {"ops": ops, "stream": stream}
    embedding = Embedding(
        "embedding",
        model.vocab,
        model.width,
        std=STD,
        dropout=model.dropout,
        **shared,
    )
    rope = Rope(model.width // model.heads, model.rope_theta, ops=ops)
    blocks = [_block(f"blocks.{i}", model, rope, shared) for i in range(model.layers)]
    return with_head(model, embedding, blocks, RMSNorm, shared)


def _block(name: str, model: Any, rope: Rope, shared: dict[str, Any]) -> Chain:
    std = {"std": STD, "out_std": out_std(model.layers)}
    attention = CausalSelfAttention(
        f"{name}.attention",
        model.width,
        model.heads,
        model.kv_heads,
        bias=False,
        rope=rope,
        dropout=model.dropout,
        **std,
        **shared,
    )
    mlp = SwigluMlp(f"{name}.mlp", model.width, model.ffn, **std, **shared)
    return pre_norm_block(name, model, RMSNorm, attention, mlp, shared)
