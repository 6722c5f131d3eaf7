"""The models of a recipe in PyTorch, as its users would write them.

Sizes come as the recipe's [model] section; weights are mpipar's own, by name.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention; `shards` processes of tensor parallelism hold it."""

    def __init__(self, m: Mapping[str, Any], shards: int) -> None:
        super().__init__()
        width, heads, groups = m["width"], m["heads"], m["kv_heads"]
        self.head, bias = width // heads, m["family"] == "gpt"
        self.split = [heads // shards, groups // shards, groups // shards]
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.head, bias)
        self.out = nn.Linear(width, width, bias)
        self.rope = None if bias else _rope(m["context"], self.head, m["rope_theta"])

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, -1, self.head).transpose(1, 2)
        q, k, v = qkv.split(self.split, dim=1)
        if self.rope is not None:
            q, k = _rotate(q, *self.rope), _rotate(k, *self.rope)
        shared = self.split[0] != self.split[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class GeluMlp(nn.Module):
    """Two projections around GELU."""

    def __init__(self, m: Mapping[str, Any]) -> None:
        super().__init__()
        self.up = nn.Linear(m["width"], m["ffn"])
        self.down = nn.Linear(m["ffn"], m["width"])
        self.approximate = "tanh" if m["activation"] == "gelu_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class SwigluMlp(nn.Module):
    """A gated MLP without biases."""

    def __init__(self, m: Mapping[str, Any]) -> None:
        super().__init__()
        self.gate_up = nn.Linear(m["width"], 2 * m["ffn"], bias=False)
        self.down = nn.Linear(m["ffn"], m["width"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, m: Mapping[str, Any], shards: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(m), _norm(m)
        self.attention = Attention(m, shards)
        self.mlp = GeluMlp(m) if m["family"] == "gpt" else SwigluMlp(m)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Tokens, and learned positions in a GPT."""

    def __init__(self, m: Mapping[str, Any]) -> None:
        super().__init__()
        self.token = nn.Embedding(m["vocab"], m["width"])
        if m["family"] == "gpt":
            self.position = nn.Embedding(m["context"], m["width"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        return x + self.position.weight if hasattr(self, "position") else x


class Head(nn.Module):
    """Final norm, projection to the vocabulary (tied unless it has a weight), loss."""

    def __init__(self, m: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm = _norm(m)
        if not m["tied"]:
            self.weight = nn.Parameter(torch.empty(m["vocab"], m["width"]))

    def forward(self, x: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(self.logits(x, embedding), labels)

    def logits(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """What the loss is made from; the embedding is needed where it is tied."""
        return F.linear(self.norm(x), getattr(self, "weight", embedding))


class Transformer(nn.Module):
    """The whole model; returns the mean loss over its tokens."""

    def __init__(self, m: Mapping[str, Any], shards: int = 1) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(m), Head(m)
        self.blocks = nn.ModuleList(Block(m, shards) for _ in range(m["layers"]))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x, self.embedding.token.weight, labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def load(model: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Give the model mpipar's weights, with joined projections; without any, matrices
    are drawn from N(0, 0.02²)."""
    for name, p in model.named_parameters():
        if not weights:
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
            continue
        module, _, kind = name.rpartition(".")
        is_gain = module.rpartition(".")[2].startswith("norm") and kind == "weight"
        with torch.no_grad():
            p.copy_(torch.from_numpy(weights[f"{module}.gain" if is_gain else name]))


def _norm(m: Mapping[str, Any]) -> nn.Module:
    kind = nn.LayerNorm if m["family"] == "gpt" else nn.RMSNorm
    return kind(m["width"], eps=m["norm_eps"])


def _rope(positions: int, head: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(−2i/head).   two (s, head/2)"""
    frequency = theta ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half form of RoPE.   x (b, n, s, head)"""
    first, second = x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
