"""A38: the disk is full on one rank, and all ranks act alike.

No file of that rank may grow beyond 4 KiB from its second save on.
"""

import json
import re
from pathlib import Path

import pytest
from faults.run import mpipar, start, write_recipe
from launcher import Job

from mpipar.checkpoint import checkpoints, is_complete

FULL = "mpipar.checkpoint.saver:write_shard:1:small:2"
# Writing fails once, in the middle of the numbers of the second save.
ONCE = "mpipar.checkpoint.shard:_write:1:oserror:5"
full = pytest.mark.full
ASYNC = ["true", "false"]


def train(folder: Path, fault: str, ends: int, *words: str) -> Job:
    """Six steps on two data ranks, with a save after every second one."""
    recipe = write_recipe(folder)
    words = ("checkpoint.every=2", *words, "--out", folder / "run")
    options = {"note": True, "cwd": folder, "MPIPAR_TEST_FAULT": fault, "timeout": 40}
    with start(2, "train", recipe, *words, **options) as run:
        job = run.job.result()
        assert (job.status, job.late, job.left) == (ends, False, []), job.output
        assert run.all_ended_with(ends, 2), job.output
    assert "Traceback" not in job.output
    assert not list(folder.rglob("core*"))
    return job


def left(folder: Path) -> list[str]:
    """What is in the folder of checkpoints, and what `latest` says."""
    kept = folder / "run" / "checkpoints"
    assert all(is_complete(path) for path in checkpoints(folder / "run"))
    names = sorted(path.name for path in kept.iterdir() if path.name != "latest")
    return [*names, (kept / "latest").read_text().strip()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_said(text: str, step: int) -> None:
    """Which file, and how many bytes it needs."""
    assert f"cannot save {step:08d}" in re.sub(r"/\S*step_", "", text, count=1)
    assert "shard_00001.h5" in text and "File too large" in text
    needed = int(re.search(r"\(([\d,]+) bytes to write\)", text)[1].replace(",", ""))
    # Half of the weights, m and v of the model, in fp64
    assert 30_000 < needed < 200_000


@pytest.mark.parametrize("async_", ASYNC)
def test_a_run_that_cannot_save_stops(tmp_path: Path, async_: str) -> None:
    job = train(tmp_path, FULL, 4, f"checkpoint.async={async_}")
    said = [line for line in job.output.splitlines() if "cannot save" in line]
    assert len(said) == 1
    check_said(said[0], 4)
    assert left(tmp_path) == ["step_00000002", "step_00000002"]
    # It is as good as ever, and so is the run.
    again = mpipar(2, "train", tmp_path / "recipe.toml", "checkpoint.every=2",
                   "--out", tmp_path / "run", "--resume", "auto")  # fmt: skip
    assert (again.status, again.left) == (0, []), again.output
    assert left(tmp_path)[-1] == "step_00000006"


@pytest.mark.parametrize("async_", [ASYNC[0], pytest.param(ASYNC[1], marks=full)])
def test_a_run_may_go_on_without_saves(tmp_path: Path, async_: str) -> None:
    """The last one has to succeed all the same."""
    words = ("checkpoint.on_error=continue", f"checkpoint.async={async_}")
    words += ("checkpoint.keep=1", "train.steps=7")
    job = train(tmp_path, FULL, 4, *words)
    said = [line for line in job.output.splitlines() if "cannot save" in line]
    for line, step in zip(said, (4, 6, 7), strict=True):
        check_said(line, step)
        assert ("the run goes on" in line) is (step != 7)
    assert "step 7/7" in job.output and "done after" not in job.output
    assert left(tmp_path) == ["step_00000002", "step_00000002"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 8))


@pytest.mark.parametrize("async_", [ASYNC[0], pytest.param(ASYNC[1], marks=full)])
@pytest.mark.parametrize("goes_on", [True, pytest.param(False, marks=full)])
def test_a_disk_that_is_full_for_a_moment(
    tmp_path: Path, goes_on: bool, async_: str
) -> None:
    """While weights change: nobody may wait for a save that will not go on."""
    on_error = "continue" if goes_on else "stop"
    words = (f"checkpoint.on_error={on_error}", f"checkpoint.async={async_}")
    job = train(tmp_path, ONCE, 0 if goes_on else 4, *words)
    assert job.output.count("cannot save") == 1
    assert ("done after 6" in job.output) is goes_on
    saved = ["step_00000002", "step_00000006"][: 1 + goes_on]
    assert left(tmp_path) == [*saved, saved[-1]]


@full
def test_a_checkpoint_of_before_is_untouched(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    first = mpipar(2, "train", recipe, "train.steps=2", "--out", run)
    assert first.status == 0, first.output
    folder = run / "checkpoints" / "step_00000002"
    before = contents(folder)
    fault = FULL[:-1] + "1"
    train(tmp_path, fault, 4, "checkpoint.keep=1", "--resume", "auto")
    assert contents(folder) == before
    assert left(tmp_path) == ["step_00000002", "step_00000002"]
