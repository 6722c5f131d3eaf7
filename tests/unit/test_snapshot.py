"""Snapshots: what is read is what was there when a save began, whatever changes."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mpipar.checkpoint import snapshot as room
from mpipar.checkpoint.snapshot import Snapshot
from mpipar.ops import Ops, make_ops

OPS = make_ops("cpu", "fp64")
# Elements of float64 in a part here
PART = 8
# Of `make_arrays`
PARTS = 11
SOON = 10.0


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PIECE_BYTES", 8 * PART)


def make_arrays() -> list[np.ndarray]:
    """Of several types and lengths, some of them no multiple of a part."""
    rng = np.random.default_rng(1)
    return [
        rng.normal(size=3 * PART),
        rng.normal(size=1),
        rng.normal(size=5 * PART + 3).astype(np.float32),
        rng.integers(0, 1 << 16, 4 * 4 * PART - 1).astype(np.uint16),
    ]


class Reader:
    """Reads a snapshot in a thread; `work` is done with each part, while it is used."""

    def __init__(
        self, snapshot: Snapshot, work: Callable[[int], object] = lambda number: None
    ) -> None:
        self.snapshot, self.work = snapshot, work
        self.found: list[np.ndarray] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for number, part in enumerate(self.snapshot.parts()):
                before = part.copy()
                self.work(number)
                assert np.array_equal(part, before), "changed while it was written"
                self.found.append(before)
        except BaseException as error:
            self.error = error

    def check(self, exact: list[np.ndarray]) -> None:
        """It has read what was to be read."""
        self.thread.join(SOON)
        assert not self.thread.is_alive() and self.error is None, self.error
        found = b"".join(part.tobytes() for part in self.found)
        assert found == b"".join(x.tobytes() for x in exact)


def overwrite(arrays: list[np.ndarray]) -> None:
    for x in arrays:
        x[...] = 77


def test_what_does_not_change_is_read_in_place() -> None:
    snapshot, arrays = Snapshot(OPS), make_arrays()
    snapshot.begin(arrays)
    parts = list(snapshot.parts())
    assert len(parts) == PARTS and snapshot.nbytes == 0
    assert all(any(np.shares_memory(part, x) for x in arrays) for part in parts)
    assert max(part.nbytes for part in parts) == 8 * PART


def test_a_change_after_all_was_read_costs_no_buffer() -> None:
    snapshot, arrays = Snapshot(OPS), make_arrays()
    snapshot.begin(arrays)
    Reader(snapshot).check(arrays)
    snapshot.freeze()
    assert snapshot.nbytes == 0


def test_a_change_before_anything_was_read_costs_a_whole_copy() -> None:
    snapshot, arrays = Snapshot(OPS), make_arrays()
    exact = [x.copy() for x in arrays]
    snapshot.begin(arrays)
    snapshot.freeze()
    overwrite(arrays)
    assert snapshot.nbytes == sum(x.nbytes for x in exact)
    Reader(snapshot).check(exact)


@pytest.mark.parametrize("number", range(PARTS))
def test_a_change_at_any_part_does_not_show(number: int) -> None:
    """Part `number` is being written when the change is announced."""
    snapshot, arrays = Snapshot(OPS), make_arrays()
    exact = [x.copy() for x in arrays]
    in_use, goes_on, frozen = (threading.Event() for _ in range(3))

    def hold(part: int) -> None:
        if part == number:
            in_use.set()
            assert goes_on.wait(SOON)
        elif part > number:
            # Whoever announces a change waits for one part, and not for more.
            assert frozen.wait(SOON)

    def freeze() -> None:
        snapshot.freeze()
        overwrite(arrays)
        frozen.set()

    snapshot.begin(arrays)
    reader = Reader(snapshot, hold)
    assert in_use.wait(SOON)
    changer = threading.Thread(target=freeze, daemon=True)
    changer.start()
    assert not frozen.wait(0.02), "changed while a part was being written"
    goes_on.set()
    changer.join(SOON)
    reader.check(exact)
    later = sum(part.nbytes for part in reader.found[number + 1 :])
    assert snapshot.nbytes == later


def test_a_second_announcement_changes_nothing() -> None:
    snapshot, arrays = Snapshot(OPS), make_arrays()
    exact = [x.copy() for x in arrays]
    snapshot.begin(arrays)
    snapshot.freeze()
    for _ in range(3):
        overwrite(arrays)
        snapshot.freeze()
    Reader(snapshot).check(exact)


def addresses(parts: Iterator[np.ndarray]) -> list[int]:
    return [part.__array_interface__["data"][0] for part in parts]


def test_the_buffer_is_used_again() -> None:
    snapshot, arrays, places = Snapshot(OPS), make_arrays(), []
    for save in range(3):
        snapshot.begin(arrays)
        exact = [x.copy() for x in arrays]
        snapshot.freeze()
        size, places = snapshot.nbytes, [*places, addresses(snapshot.parts())]
        snapshot.begin(arrays)
        snapshot.freeze()
        for x in arrays:
            x += save + 1
        Reader(snapshot).check(exact)
        assert snapshot.nbytes == size
    assert places[0] == places[1] == places[2]


def test_a_smaller_rest_fits_the_buffer_and_a_larger_one_gets_another() -> None:
    snapshot, sizes = Snapshot(OPS), []
    for count in (4, 2, 9):
        x = np.arange(float(count * PART))
        exact = x.copy()
        snapshot.begin([x])
        snapshot.freeze()
        x[...] = -1
        Reader(snapshot).check([exact])
        sizes.append(snapshot.nbytes)
    assert sizes == [4 * 8 * PART, 4 * 8 * PART, 9 * 8 * PART]


def test_who_announces_a_change_waits_for_one_part_at_most() -> None:
    """A writer that is never idle takes its lock again as soon as it gives it back."""
    snapshot = Snapshot(OPS)
    snapshot.begin([np.zeros(60 * PART)])
    reading, started = threading.Event(), []

    def work(number: int) -> None:
        started.append(number)
        reading.set()
        time.sleep(0.01)

    reader = Reader(snapshot, work)
    reading.wait(SOON)
    before = len(started)
    snapshot.freeze()
    # The part under way, and one that began before freeze() had announced itself.
    assert len(started) <= before + 2
    reader.check([np.zeros(60 * PART)])


def test_a_reader_that_gives_up_is_not_waited_for() -> None:
    """A38: the disk is full in the middle of a part."""
    snapshot, arrays = Snapshot(OPS), make_arrays()
    snapshot.begin(arrays)
    parts = snapshot.parts()
    next(parts), next(parts)
    parts.close()
    changer = threading.Thread(target=snapshot.freeze, daemon=True)
    changer.start()
    changer.join(SOON)
    assert not changer.is_alive()
    # The next save is as good as any.
    snapshot.begin(arrays)
    Reader(snapshot).check(arrays)


def test_nothing_is_a_snapshot_too() -> None:
    snapshot = Snapshot(OPS)
    for arrays in ([], [np.zeros(0)]):
        snapshot.begin(arrays)
        snapshot.freeze()
        assert list(snapshot.parts()) == [] and snapshot.nbytes == 0


def test_changes_at_any_time_do_not_show() -> None:
    rng, snapshot = random.Random(3), Snapshot(OPS)
    for _ in range(60):
        arrays = make_arrays()
        exact = [x.copy() for x in arrays]
        snapshot.begin(arrays)
        pause = rng.choice([0.0, 0.0, 1e-4, 1e-3])
        reader = Reader(snapshot, lambda number, pause=pause: time.sleep(pause))
        time.sleep(rng.choice([0.0, 1e-4, 2e-3]))
        snapshot.freeze()
        overwrite(arrays)
        reader.check(exact)


class Late(Ops):
    """A device that copies when somebody waits for it, and not before."""

    on_host = False

    def __init__(self) -> None:
        super().__init__()
        self.work: list = []

    def copy_to_host(self, x: np.ndarray, out: np.ndarray) -> None:
        self.work.append((x, out))

    def wait(self, event: object) -> None:
        while self.work:
            x, out = self.work.pop()
            out[...] = x

    finish = wait


def test_arrays_of_a_device_are_copied_beside_its_work() -> None:
    ops = Late()
    snapshot = Snapshot(ops)
    for _ in range(2):
        arrays = make_arrays()
        exact = [x.copy() for x in arrays]
        snapshot.begin(arrays)
        assert ops.work and snapshot.nbytes == sum(x.nbytes for x in exact)
        snapshot.freeze()
        overwrite(arrays)
        Reader(snapshot).check(exact)
