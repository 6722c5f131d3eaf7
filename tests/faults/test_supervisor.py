"""`mpipar run` starts a job again when it fails, as long as it gets any further."""

import os
import signal
import sys
from pathlib import Path

import pytest
from faults.run import SCRIPT, mpipar, start, steps_of, train, write_recipe
from launcher import mpiexec

from mpipar.cli.supervise import _Child

# Dies in its fifth step, after every start.
KILL = "mpipar.engine.engine:Engine.step:1:kill:5"


def job_of(recipe: Path, out: Path, *words: str) -> list[str]:
    command = [*mpiexec(), "-n", "2", *SCRIPT, "train", str(recipe), "--out", str(out)]
    return [*command, "train.steps=12", "checkpoint.every=2", *words]


def test_a_job_that_dies_again_and_again_comes_to_its_end(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    out, whole = tmp_path / "run", tmp_path / "whole"
    words = job_of(recipe, out, "checkpoint.async=false")
    options = {"MPIPAR_TEST_FAULT": KILL, "timeout": 120}
    job = mpipar(0, "run", "--restarts", "5", "--", *words, **options)
    assert (job.status, job.left) == (0, []), job.output
    assert job.output.count("starts it again") == 2, job.output
    assert "newest checkpoint: step_00000004" in job.output
    train(2, recipe, "--out", whole, "train.steps=12")
    assert steps_of(out) == steps_of(whole)


def test_a_job_that_gets_no_further_is_given_up(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    words = job_of(recipe, tmp_path / "run")
    fault = "mpipar.engine.engine:Engine.step:1:raise:1"
    job = mpipar(
        0, "run", "--without-progress", "2", "--", *words, MPIPAR_TEST_FAULT=fault
    )
    assert job.status not in (0, 2, 3) and job.left == [], job.output
    assert job.output.count("the job ended with status") == 2
    assert "given up: 2 failures in a row without a new checkpoint" in job.output


def test_a_wrong_recipe_is_not_tried_again(tmp_path: Path) -> None:
    words = job_of(write_recipe(tmp_path), tmp_path / "run", "model.heads=3")
    job = mpipar(0, "run", "--", *words)
    assert job.status == 2 and "starts it again" not in job.output, job.output


def test_a_signal_stops_the_job_for_good(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    words = job_of(recipe, tmp_path / "run", "train.steps=100000")
    with start(0, "run", "--", *words) as run:
        run.wait_for("step 20")
        run.kill(run.launcher(), signal.SIGTERM)
        job = run.end()
    assert job.status == 3 and job.left == [], job.output
    assert "starts it again" not in job.output


def test_a_signal_between_two_starts_is_not_lost() -> None:
    with _Child() as child:
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.was_signalled
        assert child.run([sys.executable, "-c", "import time; time.sleep(60)"]) == 143


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "the command to run is missing"),
        (["--", "true"], "must contain: mpipar train RECIPE --out DIR"),
        (["--", "mpipar", "train", "tiny"], "must name the run's folder with --out"),
        (["--restarts", "-1", "--", "x"], "--restarts = -1 must be at least 0"),
        (["--", "/no/such", "train", "tiny", "--out", "x"], "cannot start /no/such"),
    ],
)  # fmt: skip
def test_a_command_that_cannot_go_on_is_refused(words, complaint) -> None:
    job = mpipar(0, "run", *words)
    assert job.status == 2 and complaint in job.output, job.output
