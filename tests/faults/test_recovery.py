"""A rank dies, and the others go on: the same job, the same numbers.

Needs Open MPI, whose mpiexec knows --with-ft ulfm: that of this environment, or of the
Python that MPIPAR_TEST_ULFM_PYTHON names.
"""

import os
import random
import re
import shutil
import sys
import time
import tomllib
from pathlib import Path

import pytest
from faults.run import IS_OPENMPI, start, steps_of, train, write_recipe
from launcher import Job

_OTHER = os.environ.get("MPIPAR_TEST_ULFM_PYTHON", "")
_BIN = Path(_OTHER or sys.executable).parent
JOB = {"program": [str(_BIN / "mpipar")], "launcher": [str(_BIN / "mpiexec")]}
FT = JOB | {"launcher": [*JOB["launcher"], "--with-ft", "ulfm"], "timeout": 240}

pytestmark = pytest.mark.skipif(
    not (_OTHER or IS_OPENMPI),
    reason="needs Open MPI here, or one that MPIPAR_TEST_ULFM_PYTHON points to",
)
full, exhaustive = pytest.mark.full, pytest.mark.exhaustive

STEPS = 14
STEP = "mpipar.engine.engine:Engine.step"
COPIES = ["train.recover=true", "checkpoint.copy_every=2"]
# Ranks, where each is one of 2 replicas (or 3, 4), and how many go on
LAYOUTS = {
    "dp": (4, ["parallel.data=4"], 3),
    "zero": (4, ["parallel.zero=3"], 3),
    "tp": (4, ["parallel.tensor=2"], 2),
    "pp": (4, ["parallel.pipeline=2", "model.layers=2"], 2),
    "all": (8, ["parallel.tensor=2", "parallel.pipeline=2", "model.layers=2"], 4),
}
_LOST = re.compile(r"lost ranks? (.*?); (\d+) go on \((.*?)\) from (.*)")


def recipe_of(folder: Path) -> Path:
    recipe = write_recipe(folder)
    text = recipe.read_text().replace("global_batch = 4", "global_batch = 12")
    recipe.write_text(text.replace("steps = 6", f"steps = {STEPS}"))
    return recipe


def check_end(job: Job, out: Path, words: list, ranks: int, steps: int = STEPS) -> None:
    """It has gone on, to where a run ends that is started again from there."""
    assert (job.status, job.late, job.left) == (0, False, []), job.output
    (_, count, _, origin), *_ = _LOST.findall(job.output)[-1:]
    assert int(count) == ranks, job.output
    assert [line[0] for line in steps_of(out)] == list(range(1, steps + 1))
    if origin.endswith(f"step_{steps:08d}"):
        return
    recipe = tomllib.loads((out / "recipe.toml").read_text())
    assert recipe["train"]["global_batch"] == 12
    words = [word for word in words if "parallel.data" not in str(word)]
    words.append(f"train.micro_batch={recipe['train']['micro_batch']}")
    if "step_" in origin:
        step = re.search(r"step_\d+", origin)[0]
        words += ["--resume", out / "checkpoints" / step]
    else:
        assert origin == "the first step", job.output
        step = "step_0"
    again = out.with_name("again")
    train(ranks, *words, "--out", again, **JOB, timeout=120)
    first = int(step[5:])
    assert steps_of(out)[first:] == steps_of(again)
    shutil.rmtree(again)


@exhaustive
@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_rank_may_die_at_any_moment(tmp_path: Path, kind: str) -> None:
    n, words, left = LAYOUTS[kind]
    words = [recipe_of(tmp_path), *words, "train.steps=120"]
    out, rank, after = tmp_path / "run", random.randrange(n), random.randrange(1, 60)
    with start(n, "train", *words, *COPIES, "--out", out, **FT) as run:
        run.wait_for("step 1/", 120)
        process = run.ranks()[rank]
        while len(steps_of(out)) < after:
            assert not run.job.done(), run.output
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        run.kill(process)
        job = run.end(120)
    print(f"killed rank {rank} of {kind} after step {after}")
    check_end(job, out, words, left, 120)


def faulty(tmp_path: Path, n: int, fault: str, *words: str, status: int = 0) -> Job:
    """A job in which ranks die at planted points."""
    job = run_faulty(tmp_path, n, fault, *words)
    assert (job.status, job.late, job.left) == (status, False, []), job.output
    return job


def run_faulty(tmp_path: Path, n: int, fault: str, *words: str) -> Job:
    out = tmp_path / "run"
    words = [recipe_of(tmp_path), *words, "--out", out]
    with start(n, "train", *words, MPIPAR_TEST_FAULT=fault, **FT) as run:
        return run.job.result()


def test_rank_0_dies_and_the_next_one_speaks(tmp_path: Path) -> None:
    """Copies are newer than the checkpoint; the step after them is made again."""
    words = [*COPIES, "checkpoint.every=3"]
    job = faulty(tmp_path, 2, f"{STEP}:0:kill:6", *words)
    assert "lost rank 0" in job.output and "1 go on (serial)" in job.output
    check_end(job, tmp_path / "run", [tmp_path / "recipe.toml"], 1)


@full
@pytest.mark.parametrize("kind", ["zero", "tp", "pp"])
def test_a_rank_of_each_axis_dies(tmp_path: Path, kind: str) -> None:
    n, words, left = LAYOUTS[kind]
    job = faulty(tmp_path, n, f"{STEP}:{n - 1}:kill:6", *words, *COPIES)
    assert f"lost rank {n - 1}" in job.output
    check_end(job, tmp_path / "run", [tmp_path / "recipe.toml", *words], left)


@exhaustive
def test_a_rank_that_waits_takes_the_place_of_one_that_dies(tmp_path: Path) -> None:
    # Five do not cut a batch of 12.
    faults = f"{STEP}:1:kill:5 {STEP}:4:kill:9"
    job = faulty(tmp_path, 6, faults, *COPIES)
    first, second = _LOST.findall(job.output)
    assert first[1:3] == ("4", "dp 4, 1 wait") and second[1:3] == ("4", "dp 4")
    check_end(job, tmp_path / "run", [tmp_path / "recipe.toml"], 4)


@exhaustive
def test_two_neighbours_die_together(tmp_path: Path) -> None:
    """Their copies are gone too: back to the newest checkpoint."""
    faults = f"{STEP}:1:kill:8 {STEP}:2:kill:8"
    words = [*COPIES, "checkpoint.every=5"]
    job = faulty(tmp_path, 4, faults, *words)
    assert _LOST.findall(job.output)[-1][-1].endswith("step_00000005"), job.output
    check_end(job, tmp_path / "run", [tmp_path / "recipe.toml"], 2)


@exhaustive
@pytest.mark.parametrize(
    "point",
    [
        "mpipar.engine.setup:load_tokens:1:kill:1",
        "mpipar.checkpoint.shard:_write:1:kill:2",
        "mpipar.checkpoint.copies:Copies.keep:2:kill:3",
        "mpipar.checkpoint.saver:conclude:0:kill:1",
        "mpipar.engine.engine:Engine.evaluate:1:kill:1",
        "mpipar.grid.grid:Grid.close:1:kill:1",
    ],
)
def test_a_rank_dies_outside_of_steps(tmp_path: Path, point: str) -> None:
    job = faulty(tmp_path, 3, point, *COPIES, "checkpoint.every=4")
    check_end(job, tmp_path / "run", [tmp_path / "recipe.toml"], 2)


@full
def test_too_few_are_left(tmp_path: Path) -> None:
    words = [*COPIES, "parallel.tensor=2"]
    job = faulty(tmp_path, 2, f"{STEP}:0:kill:6", *words, status=4)
    assert "lost rank 0" in job.output and "too few for one replica" in job.output
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()


def test_a_launch_that_does_not_outlive_a_rank_is_refused(tmp_path: Path) -> None:
    words = [recipe_of(tmp_path), *COPIES, "--out", tmp_path / "run"]
    job = train(2, *words, **JOB, status=2)
    assert job.output.count("without --with-ft ulfm; try Open MPI") == 1, job.output
