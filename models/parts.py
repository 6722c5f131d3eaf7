"""What all families share: the order of a pre-norm block, and how weights start."""

import math
from typing import Any

from mpipar.layers.base import Chain, Layer
from mpipar.layers.block import Residual
from mpipar.layers.dropout import Dropout
from mpipar.layers.embedding import Embedding
from mpipar.layers.head import Head
from mpipar.layers.model import Model
from mpipar.layers.norm import LayerNorm, RMSNorm
from mpipar.layers.parameter import Parameter

STD = 0.02


def out_std(layers: int) -> float:
    """Std of the projections that end a branch: 2·layers branches add up in the stream,
    whose variance stays near that of one (Radford et al. 2019, section 2.3)."""
    return STD / math.sqrt(2 * layers)


def pre_norm_block(
    name: str,
    model: Any,
    norm: type[LayerNorm] | type[RMSNorm],
    attention: Layer,
    mlp: Layer,
    shared: dict[str, Any],
) -> Chain:
    """x + attention(norm1(x)), then x + mlp(norm2(x)), each branch with dropout."""
    branches = []
    parts = (("attention", attention), ("mlp", mlp))
    for number, (part, branch) in enumerate(parts, start=1):
        before = norm(f"{name}.norm{number}", model.width, eps=model.norm_eps, **shared)
        dropout = Dropout(f"{name}.{part}.residual", model.dropout, **shared)
        branches.append(Residual(before, branch, dropout))
    return Chain(branches)


def with_head(
    model: Any,
    embedding: Embedding,
    blocks: list[Chain],
    norm: type[LayerNorm] | type[RMSNorm],
    shared: dict[str, Any],
) -> Model:
    """The whole model; its head has the embedding's weight or one of its own."""
    weight = embedding.token if model.tied else untied_weight(embedding.token)
    last = norm("head.norm", model.width, eps=model.norm_eps, **shared)
    return Model(embedding, blocks, Head(last, weight, **shared))


def untied_weight(embedding: Parameter) -> Parameter:
    """A head weight of its own, cut like the embedding."""
    return Parameter("head.weight", embedding.shape, embedding.box, "normal", STD)
