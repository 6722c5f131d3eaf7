"""The job script under a real Slurm of two nodes: runs that are stopped in every way go
on as if they had not been."""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster.slurm import Slurm, obstacle, slurm
from faults.run import INJECT, SCRIPT, write_recipe
from faults.test_resume_runs import LOADER, unlike
from launcher import members

pytestmark = pytest.mark.full
JOBS = Path(__file__).parents[2] / "jobs"
RANKS = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
# In each part of a run the fourth step takes two seconds, and so does each of some that
# only come when nothing has stopped it by then.
SLOW = " ".join(f"{LOADER}:0:slow:{call}" for call in range(4, 9))
# Says what it was given, and ends as the file "statuses" has it for its turn.
STANDS_FOR_MPIPAR = """#!/bin/bash
echo "rank $SLURM_PROCID on $SLURMD_NODENAME: GPUs $CUDA_VISIBLE_DEVICES: $*"
[ "$SLURM_PROCID" = 0 ] || exit 0
status=$(head -1 statuses)
sed -i 1d statuses
exit "${status:-0}"
"""


@pytest.fixture(scope="module")
def cluster():
    if reason := obstacle():
        pytest.skip(reason)
    with ExitStack() as stack:
        made = slurm(PYTHONPATH=INJECT, OMP_NUM_THREADS="1")
        try:
            up = stack.enter_context(made)
        except OSError as problem:
            pytest.skip(str(problem))
        yield up
    assert members(up.folder) == [] and not up.folder.exists()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder whose .venv is the environment of these tests."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A project folder in which a script stands for mpipar."""
    program = tmp_path / ".venv" / "bin" / "mpipar"
    program.parent.mkdir(parents=True)
    program.write_text(STANDS_FOR_MPIPAR)
    program.chmod(0o755)
    (tmp_path / "statuses").touch()
    return tmp_path


def srun(cluster: Slurm, *words: object, mpi: str = "pmi2"):
    return cluster.run("srun", f"--mpi={mpi}", *RANKS, *SCRIPT, *words)


def wait_for(file: Path, timeout: float = 240) -> None:
    until = time.monotonic() + timeout
    while not file.exists():
        assert time.monotonic() < until, f"no {file}"
        time.sleep(0.02)


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    cluster: Slurm, project: Path
) -> None:
    """To the bit: when it is told by a signal, and when an urgent job takes its
    nodes."""
    fault = cluster.folder / "fault"
    words = [write_recipe(project), "parallel.tensor=2", "model.dropout=0.1",
             "optimizer.warmup=3", "train.steps=11"]  # fmt: skip
    unbroken = srun(cluster, "train", *words, "--out", project / "unbroken")
    assert "tp 2 x dp 2 = 4 ranks on 2 nodes" in unbroken.stdout, unbroken.stdout
    export = f"--export=ALL,MPIPAR_TEST_FAULT={SLOW}"
    job = cluster.submit(*RANKS, export, JOBS / "slurm.sbatch", *words, cwd=project)
    signal = ("scancel", "--signal=TERM", job)
    urgent = ("sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true")
    for number, command in enumerate((signal, urgent), 1):
        wait_for(fault)
        assert cluster.run(*command, cwd=project).returncode == 0
        cluster.wait(job, Restarts=f"{number}")
        fault.unlink()
    found = cluster.wait(job, JobState="COMPLETED")
    output, run = cluster.output(found), project / "runs" / job
    assert output.count("stopped after") == 2, output
    assert output.count(f"goes on from runs/{job}/checkpoints/") == 2, output
    assert unlike(run, project / "unbroken") == []


def test_a_job_goes_back_into_the_queue_only_after_a_save(
    cluster: Slurm, stand_in: Path
) -> None:
    (stand_in / "statuses").write_text("3\n4\n")
    script = JOBS / "slurm.sbatch"
    job = cluster.submit(*RANKS, script, "mine.toml", cwd=stand_in)
    found = cluster.wait(job, JobState="FAILED")
    assert (found["Restarts"], found["ExitCode"]) == ("1", "4:0")
    words = f"train mine.toml --out runs/{job} --resume auto"
    for rank in range(4):
        line = f"rank {rank} on n{rank // 2 + 1}: GPUs : {words}"
        assert cluster.output(found).count(line) == 2, cluster.output(found)


def test_the_tasks_of_an_array_go_on_one_after_the_other(
    cluster: Slurm, stand_in: Path
) -> None:
    (stand_in / "statuses").write_text("3\n4\n")
    words = ("--array=1-3%1", *RANKS, JOBS / "slurm.sbatch")
    job = cluster.submit(*words, cwd=stand_in)
    cluster.wait(job, JobState="COMPLETED")
    found = {task["ArrayTaskId"]: task for task in cluster.tasks(job)}
    ends = [found[n]["ExitCode"] for n in "123"]
    assert ends == ["3:0", "4:0", "0:0"]
    assert {task["Restarts"] for task in found.values()} == {"0"}
    for task in found.values():
        assert f"--out runs/{job} --resume auto" in cluster.output(task)


@pytest.mark.parametrize(
    ("option", "seen"),
    [
        ("--gpus-per-task=1", ["0", "1", "0", "1"]),
        ("--gpus-per-node=2", ["0,1"] * 4),
    ],
)
def test_each_rank_sees_the_gpus_it_is_given(
    cluster: Slurm, stand_in: Path, option: str, seen: list[str]
) -> None:
    """One of its own, or all of its node, which the ranks take in turn."""
    job = cluster.submit(*RANKS, option, JOBS / "slurm.sbatch", cwd=stand_in)
    output = cluster.output(cluster.wait(job, JobState="COMPLETED"))
    parts = [line.split("GPUs ")[1] for line in sorted(output.splitlines())
             if line.startswith("rank ")]  # fmt: skip
    assert [part.partition(":")[0] for part in parts] == seen


def test_the_doctor_and_the_refusal_of_singletons(
    cluster: Slurm, tmp_path: Path
) -> None:
    """A33: without pmi2 each rank is a world of its own."""
    file = tmp_path / "found.json"
    done = srun(cluster, "doctor", "--json", file)
    assert done.returncode == 0, done.stdout
    found = {finding["name"]: finding for finding in json.loads(file.read_text())}
    _, between = found["messages"]["details"]
    assert [between["a"], between["b"]] == ["n1", "n2"]
    recipe = write_recipe(tmp_path)
    done = srun(cluster, "train", recipe, "--out", tmp_path / "run", mpi="none")
    assert done.returncode == 2
    assert done.stdout.count("launcher says 4, MPI says 1: Slurm") == 1
    assert "srun --mpi=pmi2" in done.stdout and not (tmp_path / "run").exists()
