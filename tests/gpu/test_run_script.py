"""The script for a machine with a GPU goes through all its parts on one without."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu.precisions import PRECISIONS
from gpu.run import needs, report
from gpu.run.ops import on_device, worst_of
from gpu.run.parts import PARTS, Files, Part, run_part
from gpu.run.record import Records, SkippedError, read
from gpu.run.speed import RACES
from gpu.shim.compile import GXX
from ops_cases import CALLS

from mpipar.ops import Ops

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"

# A part with a check that ends the process, and one that does not end
BROKEN = """
import os, time

def run(setting, records):
    records.check("good", lambda: 0.5, 1.0)
    records.check("deadly", lambda: os._exit(9))
    records.check("wrong", lambda: 2.0, 1.0)
    records.check("not a number", lambda: float("nan"), 1.0)
    records.check("raises", lambda: 1 / 0)
    records.figure("rate", 3.0, "GB/s", 4.0)
    records.check("endless", lambda: time.sleep(100))
    records.check("never begun", lambda: None)
"""


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "records.jsonl", "a part")


def test_a_check_that_ends_its_process_leaves_the_others(tmp_path: Path) -> None:
    module = tmp_path / "gpu" / "run" / "broken.py"
    module.parent.mkdir(parents=True)
    module.write_text(BROKEN)
    files = Files(*(tmp_path / name for name in ("records.jsonl", "scratch", "log")))
    files.log.write_text("")
    # Folders without __init__.py are joined.
    paths = f"{ROOT / 'tests'}{os.pathsep}{tmp_path}"
    env = {**os.environ, "PYTHONPATH": paths}
    part = Part("broken", "broken", "check", 6)
    found = run_part(part, files, env, seconds=6, dry=True)
    assert found["starts"] == 2 and found["late"]
    lines = {x["name"]: x for x in read(files.records) if x["kind"] == "check"}
    passed = {name: line["passed"] for name, line in lines.items()}
    assert passed == {
        "good": True, "deadly": False, "wrong": False, "not a number": False,
        "raises": False, "endless": False,
    }  # fmt: skip
    assert "ended with 9" in lines["deadly"]["error"]
    assert "ran out of time" in lines["endless"]["error"]
    assert "ZeroDivisionError" in lines["raises"]["error"]
    assert lines["wrong"]["error"] == "2 is more than 1"


def test_a_part_that_cannot_begin_is_a_failure(tmp_path: Path) -> None:
    files = Files(*(tmp_path / name for name in ("records.jsonl", "scratch", "log")))
    files.log.write_text("")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    run_part(Part("x", "no_such_module", "check", 9), files, env, seconds=30, dry=True)
    (line,) = read(files.records)
    assert line["passed"] is False and "no_such_module" in line["error"]


def test_the_table_has_every_reason_and_every_figure(
    records: Records, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    def skip() -> None:
        raise SkippedError("torch is not installed")

    assert records.check("good", lambda: None)
    assert not records.check("bad", lambda: 2.0, 1.0)
    assert not records.check("left out", skip)
    records.figure("rate", 3.0, "GB/s", 4.0)
    records.fact("card", lambda: "one GPU")
    lines, head = read(records.file), {"not_begun": ["another part"]}
    parts = [{"name": "a part", "seconds": 1.0, "late": False}]
    report.show(head, parts, lines)
    shown = capsys.readouterr().out
    for words in ("MISSED", "FAILED bad", "skipped left out", "NOT RUN another part"):
        assert words in shown
    report.write(tmp_path / "results.json", head, parts, lines)
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["facts"] == {"card": "one GPU"} and len(found["figures"]) == 1


class Faulty(Ops):
    """Ops with an error in one result, and in one array that is written."""

    def rmsnorm_fwd(self, x, gain, *, eps):
        y, rstd = super().rmsnorm_fwd(x, gain, eps=eps)
        return y, rstd * 1.001

    def linear_db(self, dy, db):
        pass


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_result_of_an_op_is_found(precision: str) -> None:
    dtype, half = PRECISIONS[precision]
    right, faulty = Ops(dtype=dtype, half=half), Faulty(dtype=dtype, half=half)
    for call in CALLS:
        worst = [
            worst_of(ops, Ops(), call, precision, [(3, 5, 6)])()
            for ops in (right, faulty)
        ]
        caught = call.op == "linear_db"
        # A hundred thousandth is less than bf16 rounds a result to.
        caught |= call.op == "rmsnorm_fwd" and precision == "fp32"
        assert worst[0] <= 1 and (worst[1] > 1) == caught, (str(call), worst)


def test_views_of_one_array_stay_that_on_the_device() -> None:
    fused = np.arange(24.0).reshape(3, 8)
    moved = on_device(Ops(), {"gate": fused[:, :3], "up": fused[1:, 3:], "n": 4})
    assert moved["gate"].base is moved["up"].base is not fused
    assert np.array_equal(moved["up"], fused[1:, 3:]) and moved["n"] == 4


def dry_run(out: Path, *words: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), "--dry-run", "--out", str(out), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


def test_every_part_has_its_module() -> None:
    there = {file.stem for file in (SCRIPT.parent / "run").glob("*.py")}
    assert {part.module for part in PARTS} <= there
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert set(RACES) == {part.name for part in PARTS if part.module == "speed"}


def test_a_wrong_word_is_refused(tmp_path: Path) -> None:
    job = dry_run(tmp_path, "--only", "speeds")
    assert job.returncode == 2 and "known are check, parity, bench" in job.stderr
    job = dry_run(tmp_path, "--wheel", "there")
    assert job.returncode == 2 and "--wheels DIR" in job.stderr


@pytest.mark.parametrize(
    ("driver", "packages", "toolkit", "wanted"),
    [
        (13, ["nvidia-cuda-runtime-cu12 12.8.93"], False, "cupy-cuda12x"),
        (13, ["nvidia-cuda-runtime 13.0.88"], False, "cupy-cuda13x"),
        (13, ["nvidia-cuda-runtime 13.0.88", "nvidia-cuda-runtime-cu12 12.9.86"], False,
         "cupy-cuda13x"),
        (12, ["nvidia-cuda-runtime 13.0.88"], False, "cupy-cuda12x[ctk]"),
        (12, [], False, "cupy-cuda12x[ctk]"),
        (13, ["nvidia-cuda-nvrtc-cu12 12.9.86"], True, "cupy-cuda13x"),
    ],
)  # fmt: skip
def test_cupy_is_that_of_the_cuda_that_is_there(
    driver: int, packages: list, toolkit: bool, wanted: str, monkeypatch: Any
) -> None:
    names = [SimpleNamespace(name=p.split()[0], version=p.split()[1]) for p in packages]
    monkeypatch.setattr(needs, "distributions", lambda: names)
    monkeypatch.setattr(needs, "driver_version", lambda: driver)
    monkeypatch.setattr(needs, "has_toolkit", lambda: toolkit)
    assert needs.cupy_package() == wanted


@pytest.mark.full
@pytest.mark.skipif(GXX is None, reason="needs g++")
def test_a_dry_run_goes_through_the_parts(tmp_path: Path) -> None:
    modules = ("facts", "ops", "products", "attention", "layouts", "kernels")
    job = dry_run(tmp_path, "--only", ",".join(modules))
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    wanted = [part.name for part in PARTS if part.module in modules]
    assert [part["name"] for part in found["parts"]] == wanted
    assert found["failed"] == 0 and found["passed"] > 30 and found["figures"]
