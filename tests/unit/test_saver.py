"""Saving: one after another, in the background, on a full disk, within memory."""

import errno
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from saved import (
    KINDS,
    facts_of,
    in_child,
    is_of,
    make_saver,
    make_state,
    names,
    numbers,
    read,
    save,
)

from mpipar.checkpoint import Saved, checkpoints, find_checkpoint, snapshot
from mpipar.checkpoint.files import PatientFile
from mpipar.errors import CheckpointError

MIB = 1 << 20


def steps(run: Path) -> list[str]:
    """Checkpoints, and what `latest` says; nothing else may be there."""
    folder = run / "checkpoints"
    latest = (folder / "latest").read_text().strip()
    assert [f"checkpoints/{n}" for n in names(folder) if n != "latest"] == [
        str(path.relative_to(run)) for path in checkpoints(run)
    ]
    return [*(str(int(path.name[5:])) for path in checkpoints(run)), latest]


def test_saves_follow_each_other(tmp_path: Path) -> None:
    with make_saver(tmp_path) as saver:
        for step in (1, 2, 3):
            assert not saver.is_open and saver.finish() is None
            saver.begin(facts_of(step), make_state(step), KINDS)
            assert saver.is_open
            saved = saver.finish()
            assert saved.error is None and saved.folder == find_checkpoint(tmp_path)
            assert 0 < saved.exposed_seconds <= saved.seconds < 10
    assert steps(tmp_path) == ["1", "2", "3", "step_00000003"]
    for step, folder in enumerate(checkpoints(tmp_path), 1):
        assert is_of(folder, step)


def test_only_one_save_is_open(tmp_path: Path) -> None:
    with make_saver(tmp_path) as saver:
        saver.begin(facts_of(1), make_state(0), KINDS)
        with pytest.raises(AssertionError, match="open"):
            saver.begin(facts_of(2), make_state(0), KINDS)
        assert saver.finish().error is None


@pytest.mark.parametrize(("keep", "left"), [(0, "1234"), (1, "4"), (3, "234")])
def test_the_newest_stay(tmp_path: Path, keep: int, left: str) -> None:
    """A37"""
    for step in (1, 2, 3, 4):
        assert save(tmp_path, step, step, keep=keep).note == ""
    assert steps(tmp_path) == [*left, "step_00000004"]
    assert all(is_of(path, int(path.name[5:])) for path in checkpoints(tmp_path))


def test_what_an_earlier_run_saved_counts_as_well(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    save(tmp_path, 6, keep=2)
    assert steps(tmp_path) == ["5", "6", "step_00000006"]


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    saved = save(tmp_path, 1, seed=2)
    assert "step_00000001 is there already" in str(saved.error)
    assert isinstance(saved.error, CheckpointError) and saved.error.agreed
    assert steps(tmp_path) == ["1", "step_00000001"]
    assert is_of(checkpoints(tmp_path)[0], 1)


# In the background


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes of numbers wait for the event."""
    gate, write = threading.Event(), os.pwrite
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 64)
    monkeypatch.setattr(os, "pwrite", lambda *args: (gate.wait(9), write(*args))[1])
    return gate


def advance_when_ready(saver: object) -> Saved:
    """As steps do, which ask whether all are ready."""
    until = time.monotonic() + 10
    while saver.is_open:
        assert time.monotonic() < until
        if saver.ready and (saved := saver.advance()):
            return saved
        time.sleep(0.001)
    raise AssertionError("no save is open")


def test_a_run_goes_on_while_the_disk_is_slow(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    state = make_state(5)
    with make_saver(tmp_path) as saver:
        saver.begin(facts_of(1), state, KINDS)
        assert saver.is_open and not saver.ready
        # The first part of the numbers is under way, and waited for.
        threading.Timer(0.1, slow_disk.set).start()
        saver.freeze()
        for fragment in state:
            for array in fragment.arrays.values():
                array[...] = -1
        saved = advance_when_ready(saver)
        assert saver.snapshot.nbytes > 0
        assert saved.exposed_seconds < saved.seconds
    assert is_of(saved.folder, 5)


def test_a_save_that_nobody_asks_for_any_more_ends_with_the_run(tmp_path: Path) -> None:
    with make_saver(tmp_path) as saver:
        saver.begin(facts_of(1), make_state(0), KINDS)
    # Half of one has no name.
    assert checkpoints(tmp_path) == []
    assert not any(t.name.startswith("save") for t in threading.enumerate())


# Errors


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def broken(holder: object, name: str, call: int) -> Iterator[None]:
    """The n-th call and those behind it find the disk full."""
    original, calls = getattr(holder, name), 0

    def fails(*args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        return full() if calls >= call else original(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, fails)
        yield
    assert calls >= call, f"{name} was called {calls} times"


# Where the disk can be full, and after how many calls
PLACES = {
    "the folder": (os, "mkdir", 1),
    "the structure": (PatientFile, "_write_all", 1),
    "the numbers": (os, "pwrite", 1),
    "the last numbers": (os, "pwrite", 9),
    "to flush the numbers": (os, "fsync", 1),
    "to flush a view": (os, "fsync", 2),
    "to flush the other view": (os, "fsync", 3),
    "the manifest": (Path, "write_text", 1),
    "to flush the manifest": (os, "fsync", 4),
    "to flush the folder": (os, "fsync", 5),
    "the name": (os, "rename", 1),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("changes", [False, True], ids=["waits", "goes on"])
def test_a_save_that_fails_leaves_the_last_one(
    tmp_path: Path, place: str, changes: bool
) -> None:
    """A37: with keep = 1; A38: in the background, where weights change meanwhile."""

    def attempt() -> None:
        with make_saver(tmp_path, keep=1) as saver:
            saver.begin(facts_of(10), make_state(10), KINDS)
            assert saver.finish().error is None
            with broken(*PLACES[place]):
                saver.begin(facts_of(20), make_state(20), KINDS)
                if changes:
                    time.sleep(0.05)
                    saver.freeze()
                saved = saver.finish()
            assert str(saved.error).startswith("cannot save ")
            assert "step_00000020" in str(saved.error) and saved.error.agreed
            assert "No space left" in str(saved.error)
            assert steps(tmp_path) == ["10", "step_00000010"]
            assert is_of(checkpoints(tmp_path)[0], 10)
            # The disk has room again.
            saver.begin(facts_of(30), make_state(30), KINDS)
            assert saver.finish().error is None
        assert steps(tmp_path) == ["30", "step_00000030"]
        assert is_of(checkpoints(tmp_path)[0], 30)

    # A deadlock must not stay.
    assert in_child(attempt) == 0


@pytest.mark.parametrize("call", [1, 5, 9])
def test_a_full_disk_is_said_with_path_and_bytes(tmp_path: Path, call: int) -> None:
    """A38"""
    with broken(os, "pwrite", call):
        text = str(save(tmp_path, 20).error)
    needed = 8 * 3 * (28 + 24 + 4)
    assert text.count("shard_00000.h5") == 1 and f"{needed:,} bytes" in text
    assert "No space left on device" in text and "step_00000020" in text


def test_an_old_one_that_cannot_be_removed_is_a_note(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with broken(os, "rmdir", 1):
        saved = save(tmp_path, 20, seed=20, keep=1)
    assert saved.error is None and "old checkpoint" in saved.note
    assert checkpoints(tmp_path) == [saved.folder] and is_of(saved.folder, 20)


def test_a_pointer_that_cannot_move_is_no_failed_save(tmp_path: Path) -> None:
    """What has its name is saved; what `latest` names may not be removed then."""
    save(tmp_path, 10, seed=10)
    with broken(os, "replace", 1):
        saved = save(tmp_path, 20, seed=20, keep=1)
    assert saved.error is None and "latest" in saved.note
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step_00000010", "step_00000020"
    ]  # fmt: skip
    assert all(is_of(path, int(path.name[5:])) for path in checkpoints(tmp_path))


def test_a_mistake_of_our_own_is_no_full_disk(tmp_path: Path) -> None:
    """It ends the run with its traceback."""
    state = make_state(0)
    with make_saver(tmp_path) as saver, pytest.raises(ValueError, match="hold 56"):
        saver.begin(facts_of(1), state + state[:1], KINDS)
        saver.finish()
    assert checkpoints(tmp_path) == []


# What is on disk when a checkpoint gets its name


def test_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A36, when the power fails: order of writes, flushes and renames."""
    events: list[tuple[str, str]] = []

    def spy(holder: object, name: str, subject: Callable[..., object]) -> None:
        original = getattr(holder, name)

        def noted(*args: object, **named: object) -> object:
            result = original(*args, **named)
            events.append((name, Path(subject(*args)).name))
            return result

        monkeypatch.setattr(holder, name, noted)

    def opened(descriptor: int, *_: object) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    save(tmp_path, 10)
    spy(os, "pwrite", opened)
    spy(os, "fsync", opened)
    spy(PatientFile, "write", lambda file, *_: file._file.name)
    spy(Path, "write_text", lambda path, *_, **named: path)
    spy(Path, "write_bytes", lambda path, *_: path)
    spy(os, "rename", lambda old, new: new)
    spy(os, "replace", lambda old, new: new)
    spy(os, "rmdir", lambda path, **_: path)
    folder = save(tmp_path, 20, keep=1).folder
    named = events.index(("rename", "step_00000020"))
    writes = ("pwrite", "write", "write_text", "write_bytes")
    for file in names(folder):
        changed = max(
            i for i, e in enumerate(events) if e[1] == file and e[0] in writes
        )
        assert changed < events.index(("fsync", file), changed) < named
    draft = next(e[1] for e in events if e[0] == "fsync" and e[1].endswith(".tmp"))
    created = max(i for i, e in enumerate(events[:named]) if e[0] in writes)
    assert created < events.index(("fsync", draft)) < named
    # Then the pointer, and only then an old one goes.
    behind = [e for e in events[named + 1 :] if e[0] != "write_text"]
    assert behind[:5] == [
        ("fsync", "checkpoints"), ("fsync", "latest.tmp"), ("replace", "latest"),
        ("fsync", "checkpoints"), ("rename", "step_00000010.old.tmp"),
    ]  # fmt: skip


# Memory


def test_a_save_that_waits_needs_no_memory(tmp_path: Path) -> None:
    shapes = {"a.weight": (1 << 20,), "b.weight": (3, 1 << 18)}
    state = make_state(1, shapes)
    size = sum(array.nbytes for f in state for array in f.arrays.values())
    assert size > 40 * MIB
    with make_saver(tmp_path) as saver:
        tracemalloc.start()
        saver.begin(facts_of(1), state, KINDS)
        saved = saver.finish()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert saved.error is None and peak < 3 * MIB
        assert saver.snapshot.nbytes == 0
    exact = numbers(state)
    found = read(saved.folder, shapes)
    assert all(np.array_equal(found[name], exact[name]) for name in exact)


def test_reading_needs_no_memory_beside_the_state(tmp_path: Path) -> None:
    shapes = {"a.weight": (3 << 18,)}
    folder = save(tmp_path, 1, shapes=shapes).folder
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    found = read(folder, shapes)
    size = sum(x.nbytes for x in found.values())
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    # `read` itself holds the state, and then copies of it.
    assert peak < 2 * size + 6 * MIB


def test_a_disk_that_is_slow_to_flush_does_not_keep_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written, but not on disk: there is nothing to copy, nor to wait for."""
    flushing, let = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(file: int) -> None:
        flushing.set()
        assert let.wait(20)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    with make_saver(tmp_path) as saver:
        saver.begin(facts_of(1), make_state(1), KINDS)
        assert flushing.wait(20)
        frozen = threading.Thread(target=saver.freeze)
        frozen.start()
        frozen.join(20)
        assert not frozen.is_alive() and saver.snapshot.nbytes == 0
        let.set()
        assert saver.finish().error is None
