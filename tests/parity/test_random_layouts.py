"""Recipes drawn at random, as far as `resolve` allows them, against the serial run.

All ranks draw the same recipes, and errors are agreed upon, so all pass or all fail.
"""

from itertools import product
from math import prod
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from parity.build import FP64, compare, make_recipe

from mpipar.config import AXES, Recipe
from mpipar.config.kinds import METHODS
from mpipar.config.schedules import NEEDS
from mpipar.errors import ConfigError


@st.composite
def sequences(draw: st.DrawFn, method: str, tp: int, cp: int) -> dict[str, object]:
    """How long sequences are, what tokens see of them, and how they are cut.

    The first of each list is what the first recipe has.
    """
    usp = [0, *_divisors(cp)] if method == "usp" else [0]
    return {
        "model.context": draw(st.sampled_from([16, 24, 13, 7, 3 * tp, 2 * tp, 1])),
        "model.window": draw(st.sampled_from([5, 0, 9, 0, 2, 0, 1, 40])),
        "data.documents": draw(st.sampled_from(["separate", "joined"])),
        "data.end_token": draw(st.integers(0, 3)),
        "parallel.context": cp,
        "parallel.context_method": method or "zigzag",
        "parallel.ulysses": draw(st.sampled_from(usp)),
    }


@st.composite
def recipes(draw: st.DrawFn, ranks: int, method: str) -> Recipe:
    """A legal recipe for this number of ranks; sizes are small and mostly odd.

    method   by which ranks share sequences; none do without one
    """
    tp, pp, cp = draw(st.sampled_from(_grids(ranks, shared=bool(method))))
    dp = ranks // (tp * pp * cp)
    # 2bw updates later than the serial run.
    schedule = draw(st.sampled_from([name for name in NEEDS if name != "2bw"]))
    chunks = draw(st.sampled_from([2, 3])) if schedule == "interleaved" else 0
    share = tp * draw(st.sampled_from([cp, 1]))
    heads = share * draw(st.integers(1, 12 // share))
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
        "model.vocab": draw(st.integers(tp, 61)),
        "model.tied": draw(st.sampled_from(["true", "false"])),
        "model.dropout": draw(st.sampled_from([0.0, 0.1, 0.5])),
        **draw(sequences(method, tp, cp)),
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


def _grids(ranks: int, *, shared: bool) -> list[tuple[int, int, int]]:
    """(tp, pp, cp) that data ranks fill up; cp above 1 where sequences are shared."""
    every = product((2, 1, 4, 8), (1, 2, 4), (2, 1, 4, 8))
    return [x for x in every if ranks % prod(x) == 0 and (x[2] > 1) == shared]


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def check(comm: Any, method: str, examples: int) -> None:
    """Compare so many recipes; never by the clock, which differs between ranks."""

    @seed(crc32(f"{method} {comm.size}".encode()))
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(comm.size, method))
    def body(recipe: Recipe) -> None:
        assert compare(recipe, comm, steps=2).above(FP64) == {}, recipe

    body()


def on_ranks(
    examples: dict[int, dict[str, int]], *marks: pytest.MarkDecorator
) -> pytest.MarkDecorator:
    """Parameters method and examples."""
    params = []
    for n, methods in examples.items():
        every = [pytest.mark.mpi(n, timeout=600), *marks]
        for method, count in methods.items():
            label = f"{n} ranks {method}".strip()
            params.append(pytest.param(method, count, marks=every, id=label))
    return pytest.mark.parametrize(("method", "examples"), params)


@on_ranks({
    2: {"": 2, "ring": 3, "ulysses": 3},
    4: {"": 2, "zigzag": 3, "striped": 3},
    8: {"": 2, "allgather": 3, "usp": 3},
})  # fmt: skip
def test_a_drawn_recipe_agrees(comm, method, examples):
    check(comm, method, examples)


def drawn(usual: int, with_method: int) -> dict[int, dict[str, int]]:
    return {n: {"": usual} | dict.fromkeys(METHODS, with_method) for n in (2, 4, 8)}


@on_ranks(drawn(8, 3), pytest.mark.full)
def test_many_drawn_recipes_agree(comm, method, examples):
    check(comm, method, examples)


@on_ranks(drawn(40, 20), pytest.mark.exhaustive)
def test_very_many_drawn_recipes_agree(comm, method, examples):
    check(comm, method, examples)
