"""bench collectives times both ways, and refuses what it cannot do."""

import json
import os
from itertools import product

import pytest

from mpipar.bench.collectives import run_collectives
from mpipar.errors import ConfigError


@pytest.fixture(autouse=True)
def _cores_stay():
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.mpi(4)
def test_both_ways_are_timed_on_all_operations(comm, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPIPAR_NODE_SIZE", "2")
    file = comm.bcast(tmp_path) / "found.json"
    run_collectives(comm, items=1 << 16, rounds=2, json_path=file)
    said = capsys.readouterr().out
    assert ("4 ranks on 2 nodes" in said) is (comm.rank == 0)
    if comm.rank == 0:
        rows = json.loads(file.read_text())["rows"]
        named = {(row["type"], row["operation"], row["way"]) for row in rows}
        assert named == set(product(
            ("fp32", "bf16"), ("all_reduce", "reduce_scatter", "all_gather"),
            ("at once", "over nodes"),
        ))  # fmt: skip
        assert all(len(row["seconds"]) == 2 for row in rows)


@pytest.mark.mpi(2)
def test_all_that_is_wrong_is_said_at_once_by_all(comm):
    with pytest.raises(ConfigError, match="--items = 3(.|\n)*--rounds"):
        run_collectives(comm, items=3, rounds=0, json_path=None)


@pytest.mark.mpi(1)
def test_one_rank_has_nothing_to_sum(comm):
    with pytest.raises(ConfigError, match="1 rank has nothing to sum"):
        run_collectives(comm, items=4, rounds=1, json_path=None)
