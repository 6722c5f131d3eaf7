"""The operating system sees the memory that the formulas promise."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from launcher import environment, mpiexec, run_job

TESTS = Path(__file__).parents[1]
# 19 million weights in 6 blocks, and next to no activations
SIZES = ["model.layers=6", "model.width=512", "model.heads=8", "model.ffn=2048"]
SIZES += ["train.precision=fp32", "train.global_batch=2", "train.micro_batch=1"]


def held(folder: Path, *words: str) -> list[tuple[int, int]]:
    """(bytes by formula, bytes resident) of each of two ranks."""
    folder.mkdir()
    command = [*mpiexec(), "-n", "2", sys.executable, "-m", "parity.resident"]
    env = environment(folder, PYTHONPATH=str(TESTS), OMP_NUM_THREADS="1")
    until = time.monotonic() + 240
    job = run_job(
        [*command, *SIZES, *words], folder, env, lambda: time.monotonic() > until
    )
    assert job.status == 0 and not job.late, job.output
    return json.loads(job.output.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="no smaps")
def test_resident_memory_falls_as_the_formula_says(tmp_path):
    stages = [held(tmp_path / str(z), f"parallel.zero={z}") for z in range(4)]
    whole = stages[0]
    for before, after in pairwise(stages):
        assert after[0][1] < before[0][1] + 2**20
    for stage in stages[1:]:
        for rank in range(2):
            promised = whole[rank][0] - stage[rank][0]
            seen = whole[rank][1] - stage[rank][1]
            assert seen == pytest.approx(promised, rel=0.05), stages
