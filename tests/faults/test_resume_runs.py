"""Runs that are stopped and go on, as their users see them."""

import json
import sys
from pathlib import Path

import pytest
from faults.run import steps_of, train, write_recipe
from parity.build import read_arrays

from mpipar.checkpoint import checkpoints, read_manifest

full = pytest.mark.full
LOADER = "mpipar.data.loader:Loader.train_batches"


def unlike(run: Path, other: Path) -> list[str]:
    """What differs in two runs: steps, or arrays of the newest checkpoint, in a bit."""
    ours, theirs = (read_arrays(checkpoints(folder)[-1]) for folder in (run, other))
    assert ours.keys() == theirs.keys()
    wrong = [n for n, x in ours.items() if x.tobytes() != theirs[n].tobytes()]
    if steps_of(run) != steps_of(other):
        wrong.append("steps")
    ours, theirs = (read_manifest(checkpoints(f)[-1]).progress for f in (run, other))
    return wrong if ours == theirs else [*wrong, "progress"]


def stopped_at(run: Path) -> int:
    """The step of a run that was asked to stop: saved, and in all that it says."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped"] is True
    assert read_manifest(checkpoints(run)[-1]).progress.step == summary["steps"]
    assert [step for step, *_ in steps_of(run)] == [*range(1, summary["steps"] + 1)]
    return summary["steps"]


RUNS = {
    "two data ranks": (2, "", ["1:term"]),
    # A44: each sample once and in its order, with accumulation and dropout
    "workers": (
        4,
        "parallel.tensor=2 train.global_batch=8 train.micro_batch=2 model.dropout=0.1 "
        "data.workers=1",
        ["2:usr1"],
    ),
    "2bw": (
        2,
        "parallel.pipeline=2 parallel.schedule=2bw train.micro_batch=2 "
        "model.dropout=0.1 model.layers=2",
        ["0:term"],
    ),
    "zero, twice": (2, "parallel.zero=3 checkpoint.keep=1", ["0:usr1", "1:term"]),
    "stages": (
        4,
        "parallel.pipeline=2 parallel.schedule=zb-v train.micro_batch=1 "
        "parallel.zero=2 model.layers=5 model.dropout=0.2",
        ["3:term"],
    ),
    "2bw in 16 bits, thrice": (
        4,
        "parallel.pipeline=2 parallel.schedule=2bw train.micro_batch=1 "
        "parallel.zero=2 model.layers=2 train.precision=fp16 train.loss_scale=1e9 "
        "train.steps=16",
        ["3:term", "1:usr1", "0:term"],
    ),
}  # fmt: skip
# What is left out here is part of the last one and of others.
REST = ("2bw", "two data ranks", "zero, twice")
MARKS = {"workers": [], **dict.fromkeys(REST, pytest.mark.exhaustive)}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS.get(n, full)) for n in RUNS]
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path, name: str) -> None:
    """To the bit: losses, weights, moments; saves on the way change nothing."""
    n, words, faults = RUNS[name]
    recipe = write_recipe(tmp_path)
    words = ["train.steps=9", "optimizer.warmup=3", "train.eval_samples=4",
             *words.split()]  # fmt: skip
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    train(n, recipe, *words, "--out", unbroken)
    words += ["checkpoint.every=3", "--out", run, "--resume", "auto"]
    for number, fault in enumerate(faults, 1):
        # The signal comes while the third batch of this part is fetched.
        fault = f"{LOADER}:{fault}:4"
        job = train(n, recipe, *words, status=3, MPIPAR_TEST_FAULT=fault)
        assert ("goes on from" in job.output) == (number > 1)
        # With a batch open the last step that has ended is one less.
        assert stopped_at(run) == (3 if "2bw" in name else 4) * number
    job = train(n, recipe, *words)
    assert f"goes on from {run}" in job.output
    assert unlike(run, unbroken) == []
    assert list((run / "checkpoints").glob("*.tmp")) == []


def test_a_run_folder_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    go_on = (recipe, "checkpoint.every=2", "--out", out, "--resume", "auto")
    # There is nothing to go on with, and hardly any time.
    job = train(2, *go_on, "train.max_hours=1e-9", status=3)
    assert "goes on from" not in job.output and stopped_at(out) == 1
    job = train(0, recipe, "--out", out, status=2)
    assert f"{out} already holds a run; --resume auto goes on with it" in job.output
    job = train(2, *go_on, "train.max_hours=1")
    assert f"goes on from {out}" in job.output and len(steps_of(out)) == 6
    before = contents(out)
    job = train(0, *go_on)
    assert "nothing to do" in job.output and "step 6" in job.output
    older = out / "checkpoints" / "step_00000002"
    job = train(0, recipe, "--out", out, "--resume", older, "train.steps=9", status=2)
    assert "step_00000006 is newer than --resume" in job.output
    job = train(
        0, *go_on, "model.layers=2", "model.heads=4", "model.tied=false",
        "model.context=32", "train.steps=9", status=2,
    )  # fmt: skip
    for key in ("layers = 2 must be 1", "heads = 4 must be 2", "context = 32 must be"):
        assert f"model.{key}" in job.output
    assert "model.tied = false must be true" in job.output
    assert "Traceback" not in job.output and contents(out) == before


@full
def test_a_run_may_go_on_elsewhere(tmp_path: Path) -> None:
    """From an older checkpoint, in another folder, all comes as it was."""
    recipe, out, other = write_recipe(tmp_path), tmp_path / "run", tmp_path / "other"
    train(2, recipe, "checkpoint.every=2", "--out", out)
    before = contents(out)
    older = out / "checkpoints" / "step_00000002"
    job = train(2, recipe, "--out", other, "--resume", older, "data.workers=1")
    assert f"goes on from {older}" in job.output
    assert [step for step in unlike(other, out) if step != "steps"] == []
    assert steps_of(other) == steps_of(out)[2:] and contents(out) == before
    # What is there already is another run.
    job = train(0, recipe, "--out", other, "--resume", older, status=2)
    assert f"{other} already holds another run than --resume" in job.output


@full
def test_little_time_at_a_time_is_enough(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    train(2, recipe, "train.steps=3", "--out", tmp_path / "unbroken")
    words = (recipe, "train.steps=3", "--out", out, "--resume", "auto")
    for step in (1, 2, 3):
        train(2, *words, "train.max_hours=1e-9", status=3)
        assert len(steps_of(out)) == step
    assert "nothing to do" in train(2, *words, "train.max_hours=1e-9").output
    assert unlike(out, tmp_path / "unbroken") == []


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# mpipar that writes down which samples its ranks are given, and their tokens
NOTING = """
import json, os, sys
from mpipar.cli import main
from mpipar.data import Sampler
whole = Sampler.train_batches
def train_batches(self, step):
    batches = whole(self, step)
    with open(os.environ["NOTES"], "a") as file:
        for b in batches:
            for number, row in zip(b.samples.tolist(), b.tokens.tolist()):
                file.write(json.dumps([step, number, row]) + "\\n")
    return batches
Sampler.train_batches = train_batches
sys.exit(main())
"""


@full
def test_no_sample_is_lost_or_comes_twice(tmp_path: Path) -> None:
    """A44: with other data ranks and another global batch, over the end of an epoch."""
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    script, notes = tmp_path / "noting.py", tmp_path / "notes"
    script.write_text(NOTING)
    options = {"program": [sys.executable, str(script)], "NOTES": str(notes)}
    more = ["model.context=64", "train.steps=60", "optimizer.schedule=constant"]
    parts = [(2, 4, 21), (3, 6, 31), (1, 5, 0)]
    for n, batch, call in parts:
        fault = f"{LOADER}:0:term:{call}" if call else None
        words = [f"train.global_batch={batch}", "--resume", "auto", "--out", out]
        train(n, recipe, *more, *words, status=3 if call else 0,
              MPIPAR_TEST_FAULT=fault, **options)  # fmt: skip
    seen = [json.loads(line) for line in notes.read_text().splitlines()]
    steps = [step for step, *_ in sorted(seen)]
    numbers = [number for _, number, _ in sorted(seen)]
    assert numbers == [*range(21 * 4 + 31 * 6 + 8 * 5)]
    assert steps == sorted(
        [*range(21)] * 4 + [*range(21, 52)] * 6 + [*range(52, 60)] * 5
    )
    progress = read_manifest(checkpoints(out)[-1]).progress
    assert progress.samples == len(numbers) and progress.tokens == 64 * len(numbers)
    epoch = progress.train_samples
    assert epoch < len(numbers) < 2 * epoch or epoch == 0
    rows = [str(row) for *_, row in sorted(seen, key=lambda x: x[1])]
    assert len({*rows[:epoch]}) == epoch
