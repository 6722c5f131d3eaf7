"""The models of a recipe in JAX, as its users would write them.

Sizes come as the recipe's [model] section; weights are mpipar's own, by name, with
matrices turned to (in, out).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Weights = Mapping[str, Array]


def mean_loss(m: Mapping[str, Any], w: Weights, ids: Array, labels: Array) -> Array:
    """Cross-entropy over all tokens of ids (b, s) and labels (b, s)."""
    token = w["embedding.token.weight"]
    x = token[ids] + w.get("embedding.position.weight", 0.0)
    for i in range(m["layers"]):
        block = f"blocks.{i}"
        x = x + _attention(m, w, f"{block}.attention", _norm(m, w, f"{block}.norm1", x))
        x = x + _mlp(m, w, f"{block}.mlp", _norm(m, w, f"{block}.norm2", x))
    logits = _norm(m, w, "head.norm", x) @ w.get("head.weight", token).T
    right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def _attention(m: Mapping[str, Any], w: Weights, name: str, x: Array) -> Array:
    """Causal self-attention.   x (b, s, d)"""
    n, g = m["heads"], m["kv_heads"]
    qkv = _linear(w, f"{name}.qkv", x).reshape(*x.shape[:2], n + 2 * g, -1)
    q, k, v = jnp.split(qkv, (n, n + g), axis=2)
    if m["family"] == "llama":
        q, k = _rotate(q, m["rope_theta"]), _rotate(k, m["rope_theta"])
    y = _attend(q, *(jnp.repeat(each, n // g, axis=2) for each in (k, v)))
    return _linear(w, f"{name}.out", y.reshape(x.shape))


def _attend(q: Array, k: Array, v: Array) -> Array:
    """Softmax of the past's scores times v.   all (b, s, n, h)

    On CPUs faster than jax.nn.dot_product_attention; division comes last, where the
    array is small.
    """
    _, s, _, h = q.shape
    future = jnp.triu(jnp.full((s, s), -jnp.inf), 1)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) * h**-0.5 + future
    peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    exps = jnp.exp(scores - peak)
    total = exps.sum(axis=-1).swapaxes(1, 2)[..., None]
    return jnp.einsum("bnst,btnh->bsnh", exps, v) / total


def _mlp(m: Mapping[str, Any], w: Weights, name: str, x: Array) -> Array:
    """GELU or SwiGLU between two projections.   x (b, s, d)"""
    if m["family"] == "gpt":
        up = _linear(w, f"{name}.up", x)
        y = jax.nn.gelu(up, approximate=m["activation"] == "gelu_tanh")
    else:
        gate, up = jnp.split(_linear(w, f"{name}.gate_up", x), 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return _linear(w, f"{name}.down", y)


def _linear(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def _norm(m: Mapping[str, Any], w: Weights, name: str, x: Array) -> Array:
    """LayerNorm or RMSNorm.   x (b, s, d)"""
    if m["family"] == "gpt":
        x = x - x.mean(axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + m["norm_eps"])
    return x * scale * w[f"{name}.gain"] + w.get(f"{name}.bias", 0.0)


def _rotate(x: Array, theta: float) -> Array:
    """The half form of RoPE.   x (b, s, n, h)"""
    _, s, _, h = x.shape
    frequency = theta ** (-jnp.arange(0, h, 2) / h)
    angle = (jnp.arange(s)[:, None] * frequency)[:, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1)
