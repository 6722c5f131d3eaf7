"""The doctor's trial of a folder by all ranks."""

import os
from pathlib import Path

import pytest

from mpipar.cli import folder
from mpipar.cli.folder import judge_folder, try_folder

FAULT = """
import os, runpy, sys, time
def refuse(*_):
    raise OSError({number}, os.strerror({number}))
{fault}
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.fixture
def shared(comm, tmp_path: Path) -> Path:
    return comm.bcast(tmp_path)


@pytest.fixture
def plant(tmp_path_factory, monkeypatch):
    """Call plant(fault) to have the program run into it on this rank."""

    def plant(fault: str, number: int = 0) -> None:
        program = tmp_path_factory.mktemp("fault") / "program.py"
        text = FAULT.format(fault=fault, number=number, program=str(folder.PROGRAM))
        program.write_text(text)
        monkeypatch.setattr(folder, "PROGRAM", program)

    return plant


@pytest.mark.mpi(2)
def test_a_good_folder_is_left_as_it_was(comm, shared) -> None:
    trials = try_folder(comm, "a", shared / "not" / "yet")
    assert [trial.folder for trial in trials] == [str(shared)] * 2
    assert not any(trial.failed or trial.hidden or trial.lock for trial in trials)
    assert all(trial.free > 0 and trial.kind for trial in trials)
    comm.barrier()
    assert os.listdir(shared) == []


@pytest.mark.mpi(2)
def test_a_rank_that_cannot_write_is_told_to_all(comm, shared, plant) -> None:
    if comm.rank == 1:
        plant("os.fsync = refuse", 28)
    trials = try_folder(comm, f"host{comm.rank}", shared)
    assert not trials[0].failed
    (found,) = judge_folder([trials[1]], "")
    assert found.state == "bad" and "No space left on device" in found.text
    assert judge_folder(trials, "")[0].text.endswith("(rank 1 on host1)")


@pytest.mark.mpi(2)
def test_a_file_system_that_hangs_is_given_up(comm, shared, plant) -> None:
    if comm.rank == 1:
        plant("os.fsync = lambda file: time.sleep(600)")
    trials = try_folder(comm, "a", shared, seconds=1 if comm.rank == 1 else 60)
    assert trials[1].failed == "the file system does not respond: no answer in 1 s"
    assert not trials[0].failed


@pytest.mark.mpi(2)
def test_a_folder_of_one_node_alone_is_told(comm, shared, plant) -> None:
    """The other rank has the same names on a disk of its own, where nothing comes."""
    if comm.rank == 1:
        clock = "time.monotonic = iter((0, 99)).__next__"
        plant(f"os.path.exists = lambda path: False; {clock}")
    trials = try_folder(comm, f"host{comm.rank}", shared)
    assert [trial.hidden for trial in trials] == [False, True]
    found, *_ = judge_folder(trials, "")
    assert found.state == "bad" and "rank 1 on host1 cannot see" in found.text


@pytest.mark.mpi(2)
def test_a_folder_without_locks_is_told_and_used(comm, shared, plant) -> None:
    plant("import fcntl; fcntl.flock = refuse", 37)
    trials = try_folder(comm, "a", shared)
    assert [trial.lock for trial in trials] == ["No locks available"] * 2
    assert not any(trial.failed or trial.hidden for trial in trials)


@pytest.mark.mpi(2)
def test_where_nothing_can_be_made_all_are_told(comm, shared, plant) -> None:
    plant("os.mkdir = refuse", 30)
    trials = try_folder(comm, "a", shared)
    assert [trial.failed for trial in trials] == ["Read-only file system"] * 2
    (found,) = judge_folder(trials, "")
    assert found.state == "bad" and "ranks 0, 1" in found.text
