"""A Mixtral computes what Hugging Face's MixtralForCausalLM does."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numeric import assert_close

from mpipar.config import read_recipe
from mpipar.grid import serial_grid
from mpipar.layers.base import Step
from mpipar.models import build_model
from mpipar.ops import make_ops
from mpipar.zero.flat import FlatState

RECIPE = """
[model]
family = "llama"
layers = 2
width = 32
heads = 4
kv_heads = 2
ffn = 48
context = 24
vocab = 256
rope_theta = 1e6
tied = false
[experts]
count = 8
active = 2
[train]
global_batch = 2
precision = "fp64"
"""
# Ours to theirs, as public checkpoints have them
NAMES = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "head.norm.gain": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
PARTS = {
    "norm1.gain": "input_layernorm.weight",
    "norm2.gain": "post_attention_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
}
PROJECTIONS = {"gate": "w1", "down": "w2", "up": "w3"}


@pytest.fixture
def hugging_face() -> Any:
    """torch and transformers, where they are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch", "transformers"):
            reason = f'needs {name}: pip install -e ".[compare]"'
            pytest.importorskip(name, reason=reason, exc_type=ImportError)
        import torch
        import transformers

        yield torch, transformers


def their_name(name: str) -> str:
    """What a public checkpoint calls one of our weights."""
    if name in NAMES:
        return NAMES[name]
    _, number, part = name.split(".", 2)
    if part not in PARTS:
        _, _, expert, projection, _ = part.split(".")
        part = f"block_sparse_moe.experts.{expert}.{PROJECTIONS[projection]}.weight"
    else:
        part = PARTS[part]
    return f"model.layers.{number}.{part}"


def lively_weights(parameters: Iterator[Any]) -> None:
    """Values that float32 holds too, large enough to route tokens apart."""
    rng = np.random.default_rng(3)
    for p in parameters:
        x = 0.2 * rng.standard_normal(p.data.shape, np.float32)
        p.data[...] = x + np.float32(p.init == "ones")


def our_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """After every position.   (b, s) → (b, s, v)"""
    step = Step(
        positions=np.arange(ids.shape[1]), samples=np.arange(len(ids)), training=False
    )
    x, _ = model.embedding.forward(ids, step)
    for layer in (*model.blocks, model.head.norm, model.head.projection):
        x, _ = layer.forward(x, step)
    return x


def their_model(hugging_face: Any, folder: Path, recipe: Any, weights: dict) -> Any:
    """MixtralForCausalLM from a checkpoint in the format of public ones, in float32."""
    torch, transformers = hugging_face
    from safetensors.torch import save_file

    m, experts = recipe.model, recipe.experts
    config = transformers.MixtralConfig(
        vocab_size=m.vocab, hidden_size=m.width, intermediate_size=experts.ffn,
        num_hidden_layers=m.layers, num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads, max_position_embeddings=m.context,
        rms_norm_eps=m.norm_eps, rope_theta=m.rope_theta, sliding_window=None,
        num_local_experts=experts.count, num_experts_per_tok=experts.active,
        tie_word_embeddings=m.tied, attn_implementation="eager",
    )  # fmt: skip
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(folder)
    tensors = {
        name: torch.from_numpy(x.astype(np.float32)) for name, x in weights.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, facts = transformers.MixtralForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not facts["missing_keys"] and not facts["unexpected_keys"]
    return model.eval()


def test_logits_are_those_of_hugging_face(hugging_face: Any, tmp_path: Path) -> None:
    recipe = read_recipe(RECIPE, ranks=1)
    ops = make_ops("cpu", "fp64")
    model = build_model(
        recipe.model,
        ops=ops,
        tp=serial_grid().tp,
        sequence=False,
        experts=recipe.experts,
    )
    FlatState(model.groups().parameters, ops)
    lively_weights(model.parameters())
    weights = {their_name(p.name): p.data for p in model.parameters()}
    theirs = their_model(hugging_face, tmp_path, recipe, weights)
    shape = recipe.train.global_batch, recipe.model.context
    ids = np.random.default_rng(4).integers(0, recipe.model.vocab, shape)
    torch, _ = hugging_face
    with torch.no_grad():
        right = theirs(torch.from_numpy(ids)).logits.numpy()
    ours = our_logits(model, ids)
    print(f"logits up to {abs(right).max():.3g}, off by {abs(ours - right).max():.3g}")
    assert_close(ours, right, 1e-5)
