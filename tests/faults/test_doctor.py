"""mpipar doctor as its users start it."""

import json
import os
import sys
from pathlib import Path

from faults.run import MODULE, mpipar

# Starts what follows on the first core alone
BOUND = (
    "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
NAMES = {"Python", "MPI", "ABI", "cores", "binding", "BLAS", "kernels", "bf16",
         "memory", "limits", "/dev/shm", "GPU", "HDF5", "sharing", "folder",
         "disk"}  # fmt: skip


def found_in(file: Path) -> dict[str, dict]:
    return {finding["name"]: finding for finding in json.loads(file.read_text())}


def test_one_rank_is_told_all(tmp_path: Path) -> None:
    job = mpipar(0, "doctor", "--json", "found.json", cwd=tmp_path)
    assert job.status == 0, job.output
    found = found_in(tmp_path / "found.json")
    assert set(found) == NAMES
    assert all(name in job.output for name in NAMES)
    assert os.listdir(tmp_path) == ["found.json"]


def test_a_launcher_that_does_not_belong_to_the_library_is_bad(tmp_path: Path) -> None:
    env = {"PMI_SIZE": "4", "PMI_RANK": "0"}
    job = mpipar(0, "doctor", "--json", "found.json", cwd=tmp_path, **env)
    assert job.status == 1, job.output
    assert found_in(tmp_path / "found.json")["MPI"]["state"] == "bad"


def test_ranks_on_the_same_core_are_told_by_one(tmp_path: Path) -> None:
    words = ("doctor", "--out", "runs/none/yet", "--json", tmp_path / "found.json")
    program = [sys.executable, "-c", BOUND, *MODULE]
    job = mpipar(2, *words, program=program, cwd=tmp_path)
    found = found_in(tmp_path / "found.json")
    assert set(found) == NAMES | {"messages"}
    assert job.output.count("HDF5 ") == 2, job.output
    cores = [rank["cores"] for rank in found["binding"]["details"]]
    assert len(cores) == 2 and cores[0] == cores[1]
    one_core = found["binding"]["details"][0]["node"] == 1
    assert found["binding"]["state"] == ("ok" if one_core else "bad")
    assert job.status == (0 if one_core else 1), job.output
    assert f"{tmp_path} (" in found["folder"]["text"]
    assert os.listdir(tmp_path) == ["found.json"]
