"""bench checkpoint: shares of its state, its arithmetic, and that nothing is left."""

import json
import shutil
import signal
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.run import start

from mpipar.bench import checkpoint
from mpipar.bench.checkpoint import (
    DONE,
    FAILED,
    Round,
    Summary,
    run_checkpoint,
    summarize,
    write_zeros,
)
from mpipar.bench.state import KINDS, SharedState
from mpipar.errors import CheckpointError, ConfigError

GB = 0.004
ranks = pytest.mark.mpi


@pytest.fixture
def folder(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One folder for all ranks, on which steps are short."""
    monkeypatch.setattr(checkpoint, "STEP_S", 0.01)
    return comm.bcast(tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [10_000, 4_000_000])
def test_ranks_share_the_state(count: int, size: int) -> None:
    states = [SharedState(size, rank, count) for rank in range(count)]
    held: dict[str, int] = {}
    for state in states:
        for f in state.fragments():
            assert set(f.arrays) == set(KINDS)
            held[f.name] = held.get(f.name, 0) + f.size
    assert len(held) == 1 + 12 * 8
    assert sum(held.values()) * 12 == states[0].nbytes
    assert 0.98 * size < states[0].nbytes <= size
    own = [sum(f.size for f in state.fragments()) for state in states]
    assert max(own) - min(own) <= 13 * count


def test_an_update_changes_every_sum() -> None:
    state = SharedState(100_000, 0, 1)
    before = state.sums()
    state.update()
    pairs = zip(before, state.sums(), strict=True)
    assert all(one != other for one, other in pairs)
    state.clear()
    assert all(np.isnan(x).all() for x in state.arrays.values())


@pytest.mark.parametrize("has_dd", [True, False])
@pytest.mark.parametrize("size", [0, 5000, (9 << 20) + 1])
def test_the_yardstick_writes_so_many_bytes(
    tmp_path: Path, size: int, has_dd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_dd:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    write_zeros(tmp_path / "zeros", size)
    assert (tmp_path / "zeros").read_bytes() == bytes(size)
    with pytest.raises(OSError, match="none"):
        write_zeros(tmp_path / "none" / "zeros", size)


def test_shares_are_those_of_the_same_round() -> None:
    def made(disk: float, save: float, exposed: float, longer: float) -> Round:
        return Round(disk, save, 2.0, exposed, 4, 1 + longer, 1.0, 0.5, 7, True)

    rounds = [made(1, 2, 0.2, 0.4), made(3, 4, 1.0, 2.0), made(8, 8, 0.8, 0.0)]
    warm_up = made(99, 1, 5, 5)
    found = summarize(100, [warm_up, *rounds])
    assert (found.disk_rate, found.save_rate, found.load_rate) == (100 / 3, 25, 200)
    assert (found.save_to_disk, found.exposed_share) == (0.75, 0.1)
    assert found.slowdown_s == pytest.approx(0.4)
    assert found.slowdown_share == pytest.approx(0.2)
    assert found.is_equal and (found.steps, found.buffer_bytes) == (4, 7)
    wrong = Round(**(asdict(warm_up) | {"is_equal": False}))
    assert not summarize(100, [wrong, *rounds]).is_equal


@ranks(2)
def test_it_measures_and_leaves_nothing(
    comm: Any, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    file = folder / "x.json"
    options = {"folder": folder, "rounds": 2, "json_path": file}
    assert run_checkpoint(comm, gb=GB, **options) == DONE
    comm.Barrier()
    output = capsys.readouterr().out
    assert ("is what was saved" in output) is (comm.rank == 0)
    assert [path.name for path in folder.iterdir()] == ["x.json"]
    facts = json.loads(file.read_text())
    assert 0.98 * GB * 1e9 < facts["bytes"] <= GB * 1e9 and facts["ranks"] == 2
    assert set(facts["medians"]) == {field.name for field in fields(Summary)}
    assert len(facts["rounds"]) == 2
    for one in [facts["warm_up"], *facts["rounds"]]:
        assert set(one) == {field.name for field in fields(Round)}
        assert one["is_equal"] and one["steps"] >= 2


@ranks(2)
def test_numbers_that_do_not_come_back_are_told(
    comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if comm.rank == 1:
        monkeypatch.setattr(checkpoint, "load", lambda *_: 0)
    assert run_checkpoint(comm, gb=GB, folder=folder, rounds=1) == FAILED
    assert ("FAILED" in capsys.readouterr().out) is (comm.rank == 0)


@ranks(2)
def test_an_error_of_the_disk_is_everyones(
    comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **options: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "write_zeros", full)
    with pytest.raises(CheckpointError, match="no space") as caught:
        run_checkpoint(comm, gb=GB, folder=folder)
    comm.Barrier()
    assert caught.value.agreed and list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gb": 0.0}, "--gb = 0.0"),
        ({"rounds": 0}, "--rounds = 0"),
        ({"folder": Path("/nowhere")}, "--folder /nowhere"),
    ],
)
@ranks(2)
def test_wrong_words_are_refused_by_all(comm: Any, options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        run_checkpoint(comm, **({"gb": GB} | options))
    assert caught.value.agreed


def test_the_command_runs(job: Any, tmp_path: Path) -> None:
    words = [f"--gb={GB}", "--rounds=1", f"--folder={tmp_path}"]
    done = job(2, sys.executable, "-m", "mpipar", "bench", "checkpoint", *words)
    assert (done.status, done.left) == (0, []), done.output
    assert "synchronous save" in done.output and "of dd" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_rank_leaves_nothing(tmp_path: Path, rank: int) -> None:
    words = ("--gb=0.02", "--rounds=1000", f"--folder={tmp_path}")
    with start(2, "bench", "checkpoint", *words) as run:
        until = time.monotonic() + 40
        while not list(tmp_path.glob("*/checkpoints/*")) and time.monotonic() < until:
            time.sleep(0.01)
        run.kill(run.ranks()[rank], signal.SIGINT)
        done = run.end(20)
    assert done.status != 0 and not done.late and done.left == [], done.output
    assert f"[rank {rank} of 2" in done.output and "interrupted" in done.output
    assert list(tmp_path.iterdir()) == []
