"""The doctor's trial of a folder by all ranks."""

import os
import threading
from pathlib import Path

import pytest

from mpipar.cli import folder
from mpipar.cli.folder import judge_folder, try_folder


@pytest.fixture
def shared(comm, tmp_path: Path) -> Path:
    return comm.bcast(tmp_path)


@pytest.mark.mpi(2)
def test_a_good_folder_is_left_as_it_was(comm, shared) -> None:
    trials = try_folder(comm, "a", shared / "not" / "yet")
    assert [trial.folder for trial in trials] == [str(shared)] * 2
    assert not any(trial.failed or trial.hidden or trial.lock for trial in trials)
    assert all(trial.free > 0 and trial.kind for trial in trials)
    comm.barrier()
    assert os.listdir(shared) == []


@pytest.mark.mpi(2)
def test_a_rank_that_cannot_write_is_told_to_all(comm, shared, monkeypatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    if comm.rank == 1:
        monkeypatch.setattr(os, "fsync", full)
    trials = try_folder(comm, f"host{comm.rank}", shared)
    (found,) = judge_folder([trials[1]], "")
    assert not trials[0].failed and "No space left on device" in found.text
    assert judge_folder(trials, "")[0].text.endswith("(rank 1, host1)")


@pytest.mark.mpi(2)
def test_a_file_system_that_hangs_is_given_up(comm, shared, monkeypatch) -> None:
    ever = threading.Event()
    if comm.rank == 1:
        monkeypatch.setattr(os, "fsync", lambda file: ever.wait())
    trials = try_folder(comm, "a", shared, seconds=1 if comm.rank == 1 else 60)
    ever.set()
    assert trials[1].failed == "the file system does not respond: no answer in 1 s"
    assert not trials[0].failed


@pytest.mark.mpi(2)
def test_a_folder_of_one_node_alone_is_told(comm, shared, monkeypatch) -> None:
    """The other rank has the same names on a disk of its own."""
    if comm.rank == 1:
        monkeypatch.setattr(folder, "_LATE_S", 0.0)
        own = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: own(path / "elsewhere"))
    trials = try_folder(comm, f"host{comm.rank}", shared)
    assert [trial.hidden for trial in trials] == [False, True]
    (found, *_) = judge_folder(trials, "")
    assert found.state == "bad" and "rank 1 on host1 cannot see" in found.text


@pytest.mark.mpi(2)
def test_a_folder_without_locks_is_told_and_used(comm, shared, monkeypatch) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    trials = try_folder(comm, "a", shared)
    assert [trial.lock for trial in trials] == ["No locks available"] * 2
    assert not any(trial.failed or trial.hidden for trial in trials)


@pytest.mark.mpi(2)
def test_where_nothing_can_be_made_all_are_told(comm, shared, monkeypatch) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(13, "Permission denied", str(shared))

    monkeypatch.setattr(folder.tempfile, "mkdtemp", refuse)
    trials = try_folder(comm, "a", shared)
    assert [trial.failed for trial in trials] == [f"Permission denied: {shared}"] * 2
