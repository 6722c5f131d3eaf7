"""A36: whatever is killed, whenever, a run goes on from a complete save and ends as if
nothing had happened."""

import json
import random
import time
from pathlib import Path

import pytest
from faults.run import Run, start, steps_of, train, write_recipe
from faults.test_resume_runs import unlike
from parity.build import read_arrays

from mpipar.checkpoint import checkpoints, is_complete, read_manifest
from mpipar.checkpoint.manifest import blocks_of
from mpipar.checkpoint.shard import open_shards

full, exhaustive = pytest.mark.full, pytest.mark.exhaustive
EVERY, KEEP = 2, 3


def check_newest(run: Path) -> int:
    """All checkpoints are complete, and every block of the newest is as it was saved.

    Its step; 0 where there is none.
    """
    found = checkpoints(run)
    assert all(is_complete(folder) for folder in found)
    if not found:
        return 0
    manifest = read_manifest(found[-1])
    for reader in open_shards(found[-1], manifest):
        size = reader.shard.elements * manifest.item
        for kind in manifest.kinds:
            for number in range(blocks_of(size)):
                reader.block(kind, number)
    for name, x in read_arrays(found[-1]).items():
        assert (x == x).all(), name
    return manifest.progress.step


def check_lag(run: Path, newest: int) -> None:
    """How old the newest checkpoint may be.

    A save begins after the line of its step is written, and only once the save before
    it is complete. So if s is the last step with a save, of which a line is there, the
    save of s − EVERY is complete; where s has the last line of all, its save may still
    be waiting for that one.
    """
    last = max([0, *(step for step, *_ in steps_of(run))])
    due = last // EVERY * EVERY
    oldest = due - EVERY if last > due else due - 2 * EVERY
    assert max(0, oldest) <= newest <= last


# At random moments

LAYOUTS = {
    2: ("parallel.zero=1", "model.dropout=0.1"),
    4: (
        "parallel.pipeline=2", "parallel.schedule=2bw", "train.micro_batch=1",
        "parallel.zero=2", "model.layers=2",
    ),
}  # fmt: skip


def kill_one(run: Run, rng: random.Random, start_s: float) -> None:
    """Kill a rank: one time in three within `start_s`, else while steps are made."""
    if rng.random() < 1 / 3 and start_s:
        time.sleep(rng.uniform(0, start_s))
    else:
        # Of the first step of this part there is a line.
        run.wait_for("  norm ", 90)
        time.sleep(rng.uniform(0, 1.5))
    while not (ranks := run.ranks()):
        assert not run.job.done(), run.output
        time.sleep(0.01)
    run.kill(rng.choice([*ranks.values()]))


@pytest.mark.parametrize(
    ("n", "kills", "seed"),
    [
        (2, 4, 1),
        pytest.param(4, 4, 3, marks=exhaustive),
        pytest.param(2, 8, 2, marks=exhaustive),
    ],
)
def test_kills_at_random_moments(tmp_path: Path, n: int, kills: int, seed: int) -> None:
    recipe, run, rng = write_recipe(tmp_path), tmp_path / "run", random.Random(seed)
    words = [recipe, *LAYOUTS[n], "optimizer.schedule=constant", "log.every=1000000"]
    saving = [f"checkpoint.every={EVERY}", f"checkpoint.keep={KEEP}"]
    saving += ["--out", run, "--resume", "auto"]
    newest = start_s = 0
    for _ in range(kills):
        endless = ["train", *words, *saving, "train.steps=1000000"]
        with start(n, *endless, timeout=150) as job:
            began = time.monotonic()
            kill_one(job, rng, start_s)
            start_s = start_s or time.monotonic() - began
            end = job.end(20)
        assert end.status != 0 and not end.late and end.left == [], end.output
        older, newest = newest, check_newest(run)
        assert newest >= older
        check_lag(run, newest)
    assert newest > 0
    steps = f"train.steps={newest + 5}"
    train(n, *words, *saving, steps, timeout=120)
    train(n, *words, steps, "--out", tmp_path / "unbroken", timeout=120)
    check_end(run, tmp_path / "unbroken", newest + 5)


def check_end(run: Path, unbroken: Path, steps: int) -> None:
    """All is as in the unbroken run, and no dead run has left anything."""
    assert unlike(run, unbroken) == []
    assert [step for step, *_ in steps_of(run)] == [*range(1, steps + 1)]
    kept = [folder.name for folder in checkpoints(run)]
    there = {path.name for path in (run / "checkpoints").iterdir()}
    assert there == {*kept, "latest"} and len(kept) <= KEEP
    assert (run / "checkpoints" / "latest").read_text() == kept[-1] + "\n"
    assert json.loads((run / "summary.json").read_text())["steps"] == steps


# At every point of a save, and of what follows

SAVER, FOLDER = "mpipar.checkpoint.saver", "mpipar.checkpoint.folder"
SHARD = "mpipar.checkpoint.shard"
# (attribute, call, what is the newest step afterwards): steps 2, 4, 6 … are saved, so
# the call is one of the second save, of the third one where an old one is removed.
POINTS = {
    "a shard begins": (f"{SAVER}:write_shard", 2, 2),
    "in the middle of it": (f"{SHARD}:_write", 5, 2),
    "it is flushed": (f"{SHARD}:_sum_of_rest", 2, 2),
    "an update comes": ("mpipar.checkpoint.snapshot:Snapshot.freeze", 5, 2),
    "all have written": (f"{SAVER}:Saver._begin_ending", 2, 2),
    "views": (f"{SAVER}:write_views", 2, 2),
    "manifest written": (f"{SAVER}:flush", 4, 2),
    "draft flushed": ("pathlib:Path.rename", 2, 2),
    "renamed": (f"{FOLDER}:flush", 4, 4),
    "committed": (f"{SAVER}:point_to", 2, 4),
    # The first one is of metrics.jsonl.
    "latest written": ("pathlib:Path.replace", 3, 4),
    "latest replaced": (f"{SAVER}:prune", 2, 4),
    "prune": (f"{SAVER}:prune", 3, 6),
    "nameless": ("shutil:rmtree", 1, 6),
    "done": (f"{SAVER}:Saver._end", 2, 4),
}
BOTH = ("a shard begins", "in the middle of it", "an update comes", "done")
# A run that goes on is killed as well: what it would do then, and the save again.
AGAIN = {
    "drafts are removed": (0, "mpipar.train.run:remove_drafts", 1),
    "it loads": (1, "mpipar.engine.engine:load", 1),
    "lines are kept": (0, "mpipar.train.metrics:_keep_until", 1),
    "lines are replaced": (0, "pathlib:Path.replace", 1),
    "the same save": (0, f"{SAVER}:commit", 1),
}


def runs_of(folder: Path) -> tuple[list, Path]:
    """Words of a run of ten steps that saves, which was trained without a break too."""
    recipe, out = write_recipe(folder), folder / "run"
    words = [recipe, "parallel.zero=2", "train.steps=10", "model.dropout=0.1"]
    train(2, *words, "--out", folder / "unbroken")
    words += [f"checkpoint.every={EVERY}", "checkpoint.keep=2", "--out", out]
    return [*words, "--resume", "auto"], out


def killed(words: list, rank: int, attribute: str, call: int) -> None:
    """A run that is killed there."""
    fault = f"{attribute}:{rank}:kill:{call}"
    with start(2, "train", *words, timeout=40, MPIPAR_TEST_FAULT=fault) as run:
        job = run.job.result()
        assert (run.folder / "fault").exists(), job.output
    assert job.status != 0 and not job.late and job.left == [], job.output


def check_kills(tmp_path: Path, points: list[tuple[str, int]]) -> None:
    """Kill a fresh run at each of these points of these ranks, and let it go on."""
    words, run = runs_of(tmp_path)
    for point, rank in points:
        attribute, call, expected = POINTS[point]
        killed(words, rank, attribute, call)
        assert check_newest(run) == expected, point
        check_lag(run, expected)
        train(2, *words)
        check_end(run, tmp_path / "unbroken", 10)
        run.rename(tmp_path / f"{point} {rank}")


def test_a_kill_in_a_save(tmp_path: Path) -> None:
    check_kills(tmp_path, [("draft flushed", 0)])


@pytest.mark.parametrize("tier", [pytest.param(0, marks=full),
                                  pytest.param(1, marks=exhaustive)])  # fmt: skip
def test_a_kill_at_every_point(tmp_path: Path, tier: int) -> None:
    every = [*((p, 0) for p in POINTS), *((p, 1) for p in BOTH)]
    check_kills(tmp_path, every[tier::2])


@full
def test_a_kill_while_a_run_goes_on(tmp_path: Path) -> None:
    words, run = runs_of(tmp_path)
    killed(words, 1, f"{SHARD}:_write", 5)
    for rank, attribute, call in AGAIN.values():
        killed(words, rank, attribute, call)
        assert check_newest(run) == 2
    train(2, *words)
    check_end(run, tmp_path / "unbroken", 10)


@full
def test_a_kill_of_a_run_that_is_asked_to_stop(tmp_path: Path) -> None:
    """What is saved then is not done again: its line must be there."""
    words, run = runs_of(tmp_path)
    stop = "mpipar.data.loader:Loader.train_batches:1:usr1:5"
    late = f"{stop} mpipar.engine.engine:Engine.evaluate"
    killed(words, 0, late, 1)
    assert check_newest(run) == 5
    train(2, *words)
    check_end(run, tmp_path / "unbroken", 10)
