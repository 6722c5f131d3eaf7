"""bench experts runs on one rank and on several, and refuses what it cannot do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpipar.bench.experts import Sizes, run_experts
from mpipar.errors import ConfigError

SIZES = Sizes(tokens=64, experts=4, active=2, width=64, ffn=32)


@pytest.fixture(autouse=True)
def _cores_stay() -> Any:
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.mpi(1)
def test_a_mixture_is_timed_beside_dense_work(
    comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "experts.json"
    run_experts(comm, SIZES, rounds=3, json_path=file)
    assert "outside experts" in capsys.readouterr().out
    facts = json.loads(file.read_text())
    rows = facts["rows"]
    assert [len(row["seconds"]) for row in rows.values()] == [3, 3]
    assert rows["dense"]["ratio"] == 1.0
    assert 0 < rows["mixture"]["outside_experts"] < 1


@pytest.mark.mpi(2)
def test_layouts_are_timed_and_their_states_sized(
    comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = comm.bcast(tmp_path) / "experts.json"
    run_experts(comm, SIZES, rounds=2, json_path=file)
    assert ("overlap" in capsys.readouterr().out) is (comm.rank == 0)
    if comm.rank == 0:
        rows = json.loads(file.read_text())["rows"]
        assert list(rows) == ["whole", "shared", "overlap"]
        whole, shared, overlap = (row["bytes"] for row in rows.values())
        assert len(whole) == 2 and shared == overlap
        # Weight, gradient and two moments of half of the experts of two blocks
        assert whole[0] - shared[0] == 16 * 2 * 2 * 3 * SIZES.width * SIZES.ffn


@pytest.mark.mpi(2)
def test_all_that_is_wrong_is_said_at_once_by_all(comm: Any) -> None:
    wrong = Sizes(tokens=33, experts=3, active=4, width=65, ffn=0)
    with pytest.raises(
        ConfigError,
        match="--tokens(.|\n)*--experts(.|\n)*--active(.|\n)*--width(.|\n)*--ffn"
        "(.|\n)*--rounds",
    ) as e:
        run_experts(comm, wrong, rounds=0, json_path=None)
    assert e.value.agreed
