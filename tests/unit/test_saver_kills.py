"""A36 A37: killed at any moment of a save, a run has a complete checkpoint.

A copy of the process saves step 20 with keep = 1, beside a good step 10, and is killed
before and within each of its calls to the file system, one after another.
Nothing is flushed here: what is written outlives a process, if not a machine.
"""

import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from saved import in_child, is_of, names, save

from mpipar.checkpoint import checkpoints, find_checkpoint, is_complete, remove_drafts
from mpipar.checkpoint.files import PatientFile

KILLED = signal.SIGKILL
# Calls that leave something behind, or may
CALLS = ("open", "close", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir")
FILES = ["manifest.json", "model.h5", "optimizer.h5", "shard_00000.h5"]


class Moments:
    """Counts moments of a process, and ends it at one of them; 0 = never.

    hdf5   also those of the many little writes that HDF5 makes
    """

    def __init__(self, last: int, *, hdf5: bool) -> None:
        self.last, self.count = last, 0
        for name in CALLS:
            self._watch(os, name, lambda call, *args, **named: call(*args, **named))
        # Where files are opened by name, and made
        self._watch(io, "open", lambda call, *args, **named: call(*args, **named))
        self._watch(os, "pwrite", self._torn)
        self._watch(Path, "write_text", self._torn_text)
        if hdf5:
            self._watch(PatientFile, "write", self._torn_hdf5)
            self._watch(PatientFile, "truncate", lambda call, *args: call(*args))

    def pass_one(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), KILLED)

    def _watch(self, holder: object, name: str, act: Callable) -> None:
        original = getattr(holder, name)

        def watched(*args: object, **named: object) -> object:
            self.pass_one()
            return act(original, *args, **named)

        setattr(holder, name, watched)

    def _torn(self, call: Callable, file: int, data: memoryview, offset: int) -> int:
        written = call(file, data[: len(data) // 2], offset)
        self.pass_one()
        return written + call(file, data[written:], offset + written)

    def _torn_hdf5(self, call: Callable, file: PatientFile, data: object) -> int:
        view = memoryview(data).cast("B")
        written = call(file, view[: view.nbytes // 2])
        self.pass_one()
        return written + call(file, view[written:])

    def _torn_text(self, call: Callable, path: Path, text: str, **named: str) -> int:
        call(path, text[: len(text) // 2], **named)
        self.pass_one()
        return call(path, text, **named)


@pytest.fixture(autouse=True)
def nothing_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a good step 10."""
    run = tmp_path_factory.mktemp("run")
    save(run, 10, seed=10)
    return run


def save_until(run: Path, last: int, hdf5: bool) -> int:
    """Save step 20 in a child that ends at a moment; how it ended."""

    def work() -> None:
        moments = Moments(last, hdf5=hdf5)
        saved = save(run, 20, seed=20, keep=1)
        assert saved.error is None and saved.note == ""
        (run / "moments").write_bytes(str(moments.count).encode())

    return in_child(work)


def count_moments(run: Path, hdf5: bool) -> int:
    """Moments of a save that nobody kills."""
    assert save_until(run, 0, hdf5) == 0
    count = int((run / "moments").read_text())
    (run / "moments").unlink()
    assert [path.name for path in checkpoints(run)] == ["step_00000020"]
    return count


def copies(original: Path, folder: Path, count: int) -> Iterator[tuple[int, Path]]:
    """A fresh run for each moment."""
    for last in range(1, count + 1):
        run = folder / str(last)
        shutil.copytree(original, run)
        yield last, run
        shutil.rmtree(run)


def check(run: Path, at: str) -> str:
    """The newest checkpoint is whole; which one it is."""
    newest = find_checkpoint(run)
    assert newest == checkpoints(run)[-1], at
    step = int(newest.name[5:])
    assert step in (10, 20) and is_complete(newest), at
    assert names(newest) == FILES and is_of(newest, step), at
    return newest.name


@pytest.mark.parametrize(
    "hdf5", [False, pytest.param(True, marks=pytest.mark.full)], ids=["ours", "all"]
)
def test_a_save_may_be_killed_at_any_moment(
    original: Path, tmp_path: Path, hdf5: bool
) -> None:
    shutil.copytree(original, tmp_path / "whole")
    count = count_moments(tmp_path / "whole", hdf5)
    newest = []
    for last, run in copies(original, tmp_path, count):
        at = f"killed at moment {last} of {count}"
        assert save_until(run, last, hdf5) == KILLED, at
        newest.append(check(run, at))
        folder, pointer = run / "checkpoints", (run / "checkpoints" / "latest")
        named = pointer.read_text().strip()
        assert is_complete(folder / named), at
        # As a run that goes on does:
        remove_drafts(run)
        assert not list(folder.glob("*.tmp")), at
        saved = save(run, 30, seed=30, keep=1)
        assert saved.error is None and saved.note == "" and is_of(saved.folder, 30), at
        assert names(folder) == ["latest", "step_00000030"], at
    # It is step 10 up to some moment, and 20 from there on.
    assert newest == sorted(newest) and len(set(newest)) == 2
    assert newest.index("step_00000020") > 30
