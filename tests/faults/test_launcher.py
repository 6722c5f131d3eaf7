"""The launcher of the tests themselves: planted faults must be seen and named."""

import os
import subprocess
import sys
from pathlib import Path

from launcher import members

TESTS = Path(__file__).parents[1]

PLANTED = """
import os, time, pytest
mpi = pytest.mark.mpi

@mpi(2)
def test_good(comm):
    assert comm.allreduce(1) == 2

@mpi(2)
def test_bad(comm):
    if comm.rank == 1:
        assert comm.size == 7
    comm.Barrier()

@mpi(2)
def test_behind(comm):
    comm.Barrier()

@mpi(2, timeout=2)
def test_stuck(comm):
    comm.recv(source=comm.rank)

@mpi(2)
def test_gone(comm):
    if comm.rank == 1:
        os._exit(3)
    comm.Barrier()

@mpi(2)
def test_skip(comm):
    pytest.skip("because")
"""


def test_planted_faults_are_named(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED)
    ini = "[pytest]\nfilterwarnings = error\nmarkers = mpi\n"
    (tmp_path / "pytest.ini").write_text(ini)
    # In CI pytest repeats whole stacks in its summary, and they are counted below.
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "BUILD_NUMBER")}
    env |= {"PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": "-p conftest"}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    command += [str(file)]
    result = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    told = result.stdout
    for line in (
        "PASSED test_planted.py::test_good",
        "FAILED test_planted.py::test_bad - [rank 1 of 2] assert 2 == 7",
        "PASSED test_planted.py::test_behind",
        "FAILED test_planted.py::test_stuck - no progress in time",
        "FAILED test_planted.py::test_gone - the job ended with",
        "1 skipped",
    ):
        assert line in told, told
    # Both stacks of the stuck test point into it.
    assert told.count("in test_stuck") == 2
    assert "because" in told
    assert members(tmp_path) == []
