"""bench context runs the methods that the heads allow and refuses what it cannot do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpipar.bench.context import run_context
from mpipar.errors import ConfigError

SIZES = {"length": 32, "heads": 4, "kv_heads": 2, "width": 8, "rounds": 2}


@pytest.fixture(autouse=True)
def _cores_stay() -> Any:
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.mpi(2)
def test_every_method_is_timed(
    comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = comm.bcast(tmp_path) / "context.json"
    run_context(comm, **SIZES, json_path=file)
    output = capsys.readouterr().out
    assert ("zigzag" in output) is (comm.rank == 0)
    if comm.rank == 0:
        facts = json.loads(file.read_text())
        for method in ("ring", "zigzag", "striped", "allgather", "ulysses", "usp"):
            assert len(facts[method]["seconds"]) == 2, method
        assert facts["ring"]["times_ring"] == 1.0


@pytest.mark.mpi(2)
def test_a_method_that_heads_do_not_allow_is_left_out(
    comm: Any, tmp_path: Path
) -> None:
    file = comm.bcast(tmp_path) / "context.json"
    run_context(comm, **SIZES | {"heads": 3, "kv_heads": 1}, json_path=file)
    if comm.rank == 0:
        facts = json.loads(file.read_text())
        assert "ulysses" not in facts and "usp" in facts


@pytest.mark.mpi(2)
def test_all_that_is_wrong_is_said_at_once_by_all(comm: Any) -> None:
    wrong = {"length": 33, "heads": 4, "kv_heads": 3, "width": 8, "rounds": 0}
    with pytest.raises(
        ConfigError, match="--length(.|\n)*--kv-heads(.|\n)*--rounds"
    ) as e:
        run_context(comm, **wrong, json_path=None)
    assert e.value.agreed


@pytest.mark.mpi(2)
def test_what_cannot_be_written_at_the_end_is_said_by_all(comm: Any) -> None:
    with pytest.raises(ConfigError, match="cannot write --json /dev/full") as e:
        run_context(comm, **SIZES, json_path=Path("/dev/full"))
    assert e.value.agreed
