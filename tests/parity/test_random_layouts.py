"""Recipes drawn at random, as far as `resolve` allows them, against the serial run.

All ranks draw the same recipes, and errors are agreed upon, so all pass or all fail.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from parity.build import FP64, compare, make_recipe

from mpipar.config import AXES, Recipe
from mpipar.config.schedules import NEEDS
from mpipar.errors import ConfigError


@st.composite
def recipes(draw: st.DrawFn, ranks: int) -> Recipe:
    """A legal recipe for this number of ranks; sizes are small and mostly odd."""
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= ranks]))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if tp * n <= ranks]))
    dp = ranks // (tp * pp)
    # 2bw updates later than the serial run.
    schedule = draw(st.sampled_from([name for name in NEEDS if name != "2bw"]))
    chunks = draw(st.sampled_from([2, 3])) if schedule == "interleaved" else 0
    heads = tp * draw(st.integers(1, 12 // tp))
    family = draw(st.sampled_from(["gpt", "llama"]))
    width = heads * draw(st.sampled_from([2, 4, 6]))
    micro = draw(st.integers(1, 3))
    steps = draw(st.integers(2, 4))
    changes = {
        "model.family": family,
        "model.layers": draw(st.integers(1, 3 if pp == 1 else 9)),
        "model.width": width,
        "model.heads": heads,
        "model.kv_heads": draw(st.sampled_from(_divisors(heads))),
        "model.ffn": tp * draw(st.integers(1, 9)),
        "model.context": draw(st.integers(1, 4)) * draw(st.sampled_from([1, tp, 3])),
        "model.vocab": draw(st.integers(tp, 61)),
        "model.tied": draw(st.sampled_from(["true", "false"])),
        "model.dropout": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "parallel.tensor": tp,
        "parallel.pipeline": pp,
        "parallel.schedule": schedule,
        "parallel.chunks": chunks,
        "parallel.sequence": draw(st.sampled_from(["true", "false"])),
        "parallel.zero": (zero := draw(st.integers(0, 3))),
        "parallel.zero_shard": draw(st.sampled_from(_divisors(dp))) if zero else 0,
        "parallel.prefetch": draw(st.integers(0, 3)),
        "parallel.unit": draw(st.integers(1, 3)),
        "train.recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "parallel.order": list(draw(st.permutations(AXES))),
        "parallel.bucket_mb": draw(st.sampled_from([1e-6, 0.01, 25.0])),
        "train.micro_batch": micro,
        "train.global_batch": micro * dp * draw(st.integers(1, 3 if pp == 1 else 9)),
        "train.steps": steps,
        "train.seed": draw(st.integers(0, 2**31 - 1)),
        "train.clip": draw(st.sampled_from([0.0, 0.3, 100.0])),
        "optimizer.schedule": draw(st.sampled_from(["cosine", "constant"])),
        "optimizer.warmup": draw(st.integers(0, steps)),
    }
    if family == "gpt":
        changes["model.activation"] = draw(st.sampled_from(["gelu_tanh", "gelu"]))
    try:
        return make_recipe(ranks, *(f"{key}={value}" for key, value in changes.items()))
    except ConfigError:
        assume(False)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def check(comm: Any, examples: int) -> None:
    """Compare so many recipes; never by the clock, which differs between ranks."""

    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(comm.size))
    def body(recipe: Recipe) -> None:
        assert compare(recipe, comm, steps=2).above(FP64) == {}, recipe

    body()


def on_ranks(examples: int, *marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    params = [
        pytest.param(
            examples, marks=[pytest.mark.mpi(n, timeout=600), *marks], id=f"{n} ranks"
        )
        for n in (2, 4, 8)
    ]
    return pytest.mark.parametrize("examples", params)


@on_ranks(8)
def test_a_drawn_recipe_agrees(comm, examples):
    check(comm, examples)


@on_ranks(60, pytest.mark.full)
def test_many_drawn_recipes_agree(comm, examples):
    check(comm, examples)
