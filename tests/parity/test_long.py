"""A sequence of 131,072 tokens trains on 4 ranks in memory that is too little for one.

What a process may hold beside the engine is limited. Most bytes beside it, measured:
247 MB on each of 4 ranks, 1033 MB on one; they grow in step with the tokens of a rank.
The full tier has half of the tokens and of the limit, a quarter of the time.
"""

import json
import math
import sys
from pathlib import Path

import pytest
from parity.build import (
    layout_engine,
    make_batch,
    make_recipe,
    serial_engine,
    take_step,
)

TESTS = Path(__file__).parents[1]
RANKS, TOKENS = 4, 131_072
ALLOWED_A_TOKEN = 3052
# The MLP's activations are most of what is kept; no array knows the context's length.
WORDS = """
model.family=llama model.layers=1 model.width=16 model.heads=1 model.ffn=256
model.vocab=32 parallel.context_method=zigzag
train.precision=fp32 train.global_batch=1 train.micro_batch=1 log.timeout_s=600
"""


def limit(tokens: int) -> None:
    """From now on, this process may have so many bytes of data more."""
    import resource

    allowed = ALLOWED_A_TOKEN * tokens
    lines = Path("/proc/self/status").read_text().splitlines()
    now = 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + allowed, now + allowed))


def train_together(tokens: int) -> None:
    """One step on all ranks; the first one prints what came out."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    words = [
        *WORDS.split(),
        f"model.context={tokens}",
        f"parallel.context={world.size}",
    ]
    recipe = make_recipe(world.size, *words)
    with layout_engine(recipe, world) as engine:
        limit(tokens)
        result = take_step(engine, make_batch(recipe, 0))
        peak = engine.predicted_memory()["activations_peak"]
        assert engine.executor.peak_bytes == peak
        if world.rank == 0:
            found = result.loss, result.grad_norm, result.updated, peak
            print(json.dumps(found), flush=True)


def train_alone(tokens: int) -> None:
    """The same on one rank, without MPI."""
    recipe = make_recipe(1, *WORDS.split(), f"model.context={tokens}")
    engine = serial_engine(recipe)
    limit(tokens)
    take_step(engine, make_batch(recipe, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="other limits of memory")
@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(TOKENS // 2, marks=pytest.mark.full),
        pytest.param(TOKENS, marks=pytest.mark.exhaustive),
    ],
)
def test_a_long_sequence_needs_several_ranks(job, tokens):
    def run(ranks: int, name: str, **env: str):
        code = f"from parity.test_long import {name}; {name}({tokens})"
        words = sys.executable, "-c", code
        return job(ranks, *words, timeout=900, PYTHONPATH=str(TESTS), **env)

    together = run(RANKS, "train_together", OMP_NUM_THREADS="1")
    assert together.status == 0 and not together.late, together.output
    loss, norm, updated, peak = json.loads(together.output.splitlines()[-1])
    assert math.isfinite(loss) and 3 < loss < 6 and norm > 0 and updated
    assert peak < ALLOWED_A_TOKEN * tokens < RANKS * peak
    alone = run(0, "train_alone")
    assert alone.status != 0 and not alone.late, alone.output
    assert "MemoryError" in alone.output.splitlines()[-1], alone.output
