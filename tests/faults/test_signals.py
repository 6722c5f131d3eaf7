"""A signal ends a run at the next step, with everything saved.

What launchers do when they are signalled themselves, as measured:
MPICH mpiexec  passes SIGINT and SIGTERM on to every rank: the run saves, status 3
gforker        is deaf to both; the terminal's Ctrl-C reaches its ranks directly
Open MPI       ranks get SIGTERM and 0.25 s later SIGKILL: no time to save, status 1
Ctrl-C on a terminal signals the launcher's process group; only gforker's ranks are in
it. A signal to ranks alone, or to one of them, works under each: status 3.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from faults.run import BESIDE, IS_OPENMPI, Run, start, write_recipe

from mpipar.checkpoint import is_complete

INT, TERM = signal.SIGINT, signal.SIGTERM
GFORKER = BESIDE / "mpiexec.gforker"
needs_mpich = pytest.mark.skipif(IS_OPENMPI, reason="Open MPI kills at once")
needs_gforker = pytest.mark.skipif(not GFORKER.exists(), reason="no mpiexec.gforker")
full = pytest.mark.full


def endless(folder: Path, *words: str, **options: object):
    """Start a run on two ranks that no one will wait for."""
    recipe = write_recipe(folder)
    words = ("train.steps=1000000", *words, "--out", folder / "run")
    return start(2, "train", recipe, *words, note=True, timeout=80, **options)


def send(run: Run, number: int, target: str) -> None:
    """Signal one rank, all of them, the launcher, or all in front of a terminal."""
    if target == "terminal":
        os.killpg(os.getpgid(run.launcher()), number)
        return
    ranks = run.ranks()
    named = {f"rank {rank}": [pid] for rank, pid in ranks.items()}
    named |= {"all": list(ranks.values()), "launcher": [run.launcher()]}
    for pid in named[target]:
        run.kill(pid, number)


def check_stopped(run: Run, folder: Path) -> None:
    """The run has ended at a step boundary, saved, and status 3 on every rank."""
    job = run.end()
    assert (job.status, job.late, job.left) == (3, False, []), job.output
    assert run.all_ended_with(3, 2), job.output
    summary = json.loads((folder / "run" / "summary.json").read_text())
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert summary["stopped"] is True and summary["steps"] == len(lines)
    assert "validation_loss" in json.loads(lines[-1])
    kept = folder / "run" / "checkpoints"
    latest = (kept / "latest").read_text().strip()
    assert latest == f"step_{summary['steps']:08d}"
    assert is_complete(kept / latest) and not list(kept.glob("*.tmp"))
    assert "stopped after" in job.output and "Traceback" not in job.output


@pytest.mark.parametrize(
    ("number", "target"),
    [
        (INT, "rank 0"),
        (TERM, "rank 1"),
        (INT, "all"),
        pytest.param(INT, "launcher", marks=needs_mpich),
        pytest.param(TERM, "launcher", marks=needs_mpich),
        pytest.param(INT, "terminal", marks=needs_mpich),
        pytest.param(TERM, "rank 0", marks=full),
        pytest.param(INT, "rank 1", marks=full),
        pytest.param(TERM, "all", marks=full),
        pytest.param(TERM, "terminal", marks=[needs_mpich, full]),
    ],
    ids=str,
)
def test_a_signal_saves_and_ends_the_run(
    tmp_path: Path, number: int, target: str
) -> None:
    with endless(tmp_path) as run:
        run.wait_for("step 3/")
        send(run, number, target)
        check_stopped(run, tmp_path)


@needs_gforker
@pytest.mark.parametrize(
    ("number", "target", "workers"),
    [
        (INT, "terminal", 0),
        pytest.param(INT, "rank 1", 0, marks=full),
        pytest.param(TERM, "all", 0, marks=full),
        # Workers are in the group as well: SIGTERM ends them, SIGINT must not.
        pytest.param(INT, "terminal", 1, marks=full),
        pytest.param(TERM, "terminal", 1, marks=full),
    ],
    ids=str,
)
def test_a_signal_under_gforker_saves_and_ends_the_run(
    tmp_path: Path, number: int, target: str, workers: int
) -> None:
    words = (f"data.workers={workers}",)
    with endless(tmp_path, *words, launcher=[str(GFORKER)]) as run:
        run.wait_for("step 3/")
        send(run, number, target)
        check_stopped(run, tmp_path)


@full
@pytest.mark.skipif(not IS_OPENMPI, reason="how Open MPI's mpiexec behaves")
@pytest.mark.parametrize("number", [INT, TERM], ids=str)
def test_open_mpi_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    with endless(tmp_path) as run:
        run.wait_for("step 3/")
        send(run, number, "launcher")
        job = run.end()
    assert job.status != 0 and not job.late and job.left == [], job.output


def test_a_late_signal_does_not_disturb_the_save(tmp_path: Path) -> None:
    """One rank has its signal and all stop; the other's comes while they save."""
    slow = "mpipar.checkpoint.saver:write_shard:0:slow:1"
    with endless(tmp_path, MPIPAR_TEST_FAULT=slow) as run:
        run.wait_for("step 3/")
        send(run, TERM, "rank 0")
        run.wait_for_fault()
        send(run, TERM, "rank 1")
        check_stopped(run, tmp_path)


def test_a_signal_during_a_save_in_the_background_waits_for_it(tmp_path: Path) -> None:
    slow = "mpipar.checkpoint.saver:write_shard:1:slow:1"
    words = ("checkpoint.every=2",)
    with endless(tmp_path, *words, MPIPAR_TEST_FAULT=slow) as run:
        run.wait_for_fault()
        run.wait_for("step 3/")
        send(run, TERM, "rank 0")
        check_stopped(run, tmp_path)
    assert is_complete(tmp_path / "run" / "checkpoints" / "step_00000002")


def test_a_signal_in_the_last_save_does_not_lose_the_run(tmp_path: Path) -> None:
    slow = "mpipar.checkpoint.saver:write_shard:0:slow:1"
    with endless(tmp_path, "train.steps=3", MPIPAR_TEST_FAULT=slow) as run:
        run.wait_for_fault()
        send(run, TERM, "all")
        job = run.end()
        assert job.status in (0, 3) and job.left == [], job.output
        assert run.all_ended_with(job.status, 2), job.output
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    # The third step takes two seconds: both signals come within it.
    slow = "mpipar.layers.head:Head.forward:*:slow:3"
    with endless(tmp_path, MPIPAR_TEST_FAULT=slow) as run:
        run.wait_for_fault()
        send(run, INT, "all")
        # Signals that wait for the same process become one.
        time.sleep(0.3)
        send(run, INT, "rank 1")
        job = run.end(20)
    assert job.status not in (0, 3) and not job.late and job.left == [], job.output
    assert "[rank 1 of 2" in job.output and "interrupted" in job.output
    assert "Traceback" not in job.output
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("number", [INT, TERM, signal.SIGUSR1], ids=str)
def test_a_signal_during_set_up_ends_the_job(tmp_path: Path, number: int) -> None:
    slow = "mpipar.engine.engine:Engine.__init__:*:slow:1"
    with endless(tmp_path, MPIPAR_TEST_FAULT=slow) as run:
        run.wait_for_fault()
        send(run, number, "rank 1")
        job = run.end(20)
    assert job.status not in (0, 3) and not job.late and job.left == [], job.output
    assert "[rank 1 of 2" in job.output and "interrupted" in job.output
    assert "Traceback" not in job.output
