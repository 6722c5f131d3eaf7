"""One rank fails, and every rank is gone soon, with the reason printed.

Each test plants its fault by the environment: see inject/sitecustomize.py.
"""

from pathlib import Path

import pytest
from faults.run import MODULE, SCRIPT, start, train, write_recipe
from launcher import Job

SOON = 10.0
full = pytest.mark.full
FAULTS = {
    "forward": "mpipar.layers.head:Head.forward:1:raise:3",
    "loader": "mpipar.data.sampler:Sampler.train_batches:1:raise:3",
    "checkpoint": "mpipar.checkpoint.saver:Saver.begin:1:raise:2",
    "import": "mpipar.layers.mlp::1:raise:",
    "exit": "mpipar.layers.head:Head.forward:1:exit:3",
}
# Every phase of a run, besides those above
PHASES = {
    "recipe": "mpipar.config.read:read_recipe:1:raise:1",
    "grid": "mpipar.grid.grid:Grid._cut:1:raise:2",
    "data": "mpipar.data.load:load_tokens:1:raise:1",
    "set-up": "mpipar.engine.engine:Engine._make_state:1:raise:1",
    "restore": "mpipar.engine.engine:Engine.restore:1:raise:1",
    "backward": "mpipar.layers.head:Head.backward_input:1:raise:3",
    "optimizer": "mpipar.zero.adamw:AdamW.update:1:raise:2",
    "evaluation": "mpipar.engine.engine:Engine.evaluate:1:raise:1",
    "metrics": "mpipar.train.metrics:Metrics.write:1:raise:3",
    "end": "mpipar.train.run:_Run._conclude:1:raise:1",
    "close": "mpipar.grid.grid:Grid.close:1:raise:1",
    "atexit": "mpipar.grid.grid:Grid.close:1:atexit:1",
}
# One stage fails alone, in the middle of a schedule.
PIPELINE = ("parallel.pipeline=2", "parallel.schedule=zb-h1", "train.micro_batch=1")
# A program starts in two ways; both must guard every fault.
PROGRAMS = [
    pytest.param(SCRIPT, id="script"),
    pytest.param(MODULE, id="module", marks=pytest.mark.exhaustive),
]


def run_with(
    folder: Path, fault: str, *words: str, ends: int | None = None, **options: object
) -> tuple[float, Job]:
    """Train on two data ranks with a fault; seconds from it to the end, and the job.

    ends   exit status of all ranks, where they end by themselves
    """
    recipe = write_recipe(folder)
    words = ("checkpoint.every=2", *words, "--out", folder / "run")
    options = {"timeout": 40, "MPIPAR_TEST_FAULT": fault, **options}
    options["note"] = ends is not None
    with start(2, "train", recipe, *words, **options) as run:
        job = run.job.result()
        assert not job.late and job.left == [], job.output
        assert ends is None or run.all_ended_with(ends, 2), job.output
        return run.since_fault(), job


def test_an_error_on_one_stage_ends_all(tmp_path: Path) -> None:
    took, job = run_with(tmp_path, FAULTS["forward"], *PIPELINE)
    assert job.status != 0 and took < SOON, job.output
    assert "[rank 1 of 2" in job.output and "Traceback" in job.output


def checkpoints(folder: Path) -> list[str]:
    """Checkpoints of the run and drafts, and what `latest` says."""
    kept = folder / "run" / "checkpoints"
    names = [path.name for path in kept.glob("step_*")]
    return [*sorted(names), (kept / "latest").read_text().strip()]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", FAULTS)
def test_an_error_on_one_rank_ends_all(
    tmp_path: Path, kind: str, program: list[str]
) -> None:
    """A24"""
    took, job = run_with(tmp_path, FAULTS[kind], program=program)
    assert job.status != 0 and took < SOON, job.output
    assert "[rank 1 of 2" in job.output and "Traceback" in job.output
    assert ("SystemExit: 3" if kind == "exit" else "planted fault") in job.output
    assert "[rank 0 of 2" not in job.output


# Set-up ends alike wherever it fails
REST = dict.fromkeys(("recipe", "grid", "data", "close"), pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "phase", [pytest.param(p, marks=REST.get(p, full)) for p in PHASES]
)
def test_an_error_in_any_phase_ends_all(tmp_path: Path, phase: str) -> None:
    """A24"""
    words = ()
    if phase == "restore":
        words = ("train.steps=2", "--out", tmp_path / "run")
        train(2, write_recipe(tmp_path), *words)
        words = ("--resume", "auto")
    took, job = run_with(tmp_path, PHASES[phase], *words)
    assert job.status != 0 and took < SOON, job.output
    assert job.output.count("Traceback") == 1 and "[rank 1 of 2" in job.output
    assert "planted fault" in job.output and "[rank 0 of 2" not in job.output


@pytest.mark.parametrize(
    "runs",
    [pytest.param(6, marks=full), pytest.param(30, marks=pytest.mark.exhaustive)],
)
def test_no_traceback_is_lost(tmp_path: Path, runs: int) -> None:
    """A24: launchers drop what they have not read yet when a rank aborts the job."""
    for number in range(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault = "mpipar.layers.head:Head.forward:1:raise:1"
        _, job = run_with(folder, fault)
        assert "planted fault" in job.output, f"run {number}: {job.output}"


@pytest.mark.parametrize("kind", ["raise", pytest.param("exit", marks=full)])
@pytest.mark.parametrize("module", ["mpipar.cli.train", "mpipar.cli.world"])
def test_an_error_before_mpi_starts_ends_all(
    tmp_path: Path, module: str, kind: str
) -> None:
    """A24"""
    took, job = run_with(tmp_path, f"{module}::1:{kind}:", timeout=20)
    assert job.status != 0 and took < SOON, job.output
    assert "[rank 1 of 2" in job.output and "Traceback" in job.output


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    took, job = run_with(tmp_path, "mpipar.layers.head:Head.forward:1:kill:3")
    assert job.status != 0 and took < SOON, job.output
    assert "done after" not in job.output


WAITS = "checkpoint.async=false"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("mpipar.checkpoint.saver:write_shard:1:oserror:2", ()),
        ("mpipar.checkpoint.saver:write_shard:0:oserror:2", (WAITS,)),
        # In the middle: three kinds of numbers, one after the other.
        ("mpipar.checkpoint.shard:_write:1:oserror:5", ()),
        ("mpipar.checkpoint.shard:_write:0:oserror:5", (WAITS,)),
        ("mpipar.checkpoint.saver:write_views:0:oserror:2", ()),
        ("pathlib:Path.rename:0:oserror:2", ()),
        pytest.param("pathlib:Path.rename:0:oserror:2", (WAITS,), marks=full),
        # HDF5 says RuntimeError when a write at the end of a file fails.
        pytest.param("h5py._hl.files:File.close:1:raise:2", (), marks=full),
    ],
)
def test_a_failed_save_ends_all_ranks_together(
    tmp_path: Path, fault: str, words: tuple[str, ...]
) -> None:
    """A25"""
    took, job = run_with(tmp_path, fault, *words, ends=4)
    assert job.status == 4 and took < SOON, job.output
    assert job.output.count("cannot save") == 1 and "step_00000004" in job.output
    assert "Traceback" not in job.output
    assert checkpoints(tmp_path) == ["step_00000002", "step_00000002"]


def test_a_killed_data_worker_ends_the_run(tmp_path: Path) -> None:
    """A35"""
    recipe = write_recipe(tmp_path)
    words = ("data.workers=1", "train.steps=1000000", "--out", tmp_path / "run")
    with start(2, "train", recipe, *words) as run:
        run.wait_for("step 3/")
        workers = run.workers()
        assert len(workers) == 2
        run.kill(workers[0])
        job = run.end()
    assert job.status not in (0, 3) and not job.late and job.left == [], job.output
    assert f"a data worker died: process {workers[0]} (signal 9" in job.output
    assert "done after" not in job.output


def losses(folder: Path, workers: int) -> tuple[list[str], str]:
    """The loss lines of a run with so many workers, and its output."""
    recipe = write_recipe(folder)
    out = folder / f"workers{workers}"
    words = ("train.steps=30", "model.dropout=0.1", f"data.workers={workers}")
    with start(2, "train", recipe, *words, "--out", out) as run:
        job = run.job.result()
    assert (job.status, job.late, job.left) == (0, False, []), job.output
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 30
    return [line.partition('"lr"')[0] for line in lines], job.output


def test_workers_do_not_change_a_run(tmp_path: Path) -> None:
    """A35"""
    alone, _ = losses(tmp_path, 0)
    helped, output = losses(tmp_path, 2)
    assert helped == alone
    assert "fork" not in output and "Warning" not in output
