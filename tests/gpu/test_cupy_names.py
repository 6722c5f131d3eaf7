"""What mpipar and the emulator use of CuPy is there in the real one.

CuPy is imported by the Python that MPIPAR_TEST_CUPY_PYTHON names, without a GPU.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.emulator.path import environment

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MPIPAR_TEST_CUPY_PYTHON", "")

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs a Python with CuPy in MPIPAR_TEST_CUPY_PYTHON"
)

# What the emulator has for itself, and what only instances have in CuPy
OWN = {"np", "wrapped", "cuda.streams", "ndarray.host"}
OF_INSTANCES = {"cuda.Stream.ptr", "cuda.ExternalStream.ptr"}

EMULATED = """
import cupy, inspect, json
names = {n for n in dir(cupy) if n[0] != "_"} | {"cuda." + n for n in cupy.cuda.__all__}
for name, thing in vars(cupy.cuda.runtime).items():
    if name.startswith("memcpy") or inspect.isfunction(thing) and name[0] != "_":
        names.add("cuda.runtime." + name)
for owner in list(names):
    thing = cupy
    for word in owner.split("."):
        thing = getattr(thing, word)
    if inspect.isclass(thing) and thing.__module__.startswith("cupy"):
        names |= {owner + "." + n for n in vars(thing) if n[0] != "_"}
print(json.dumps(sorted(names)))
"""

REAL = """
import json, sys, cupy
missing = []
for name in json.load(sys.stdin):
    thing = cupy
    try:
        for word in name.split("."):
            thing = getattr(thing, word)
    except AttributeError:
        missing.append(name)
print(json.dumps(missing))
"""


def missing(names):
    """Names that the real CuPy does not have."""
    result = subprocess.run(
        [PYTHON, "-c", REAL], input=json.dumps(sorted(names)), text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_emulator_has_nothing_that_cupy_has_not():
    result = subprocess.run(
        [sys.executable, "-c", EMULATED], env=environment(), text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    names = set(json.loads(result.stdout))
    assert missing(names - OWN - OF_INSTANCES) == []


def test_mpipar_uses_nothing_that_cupy_has_not():
    used = set()
    for file in (ROOT / "mpipar").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if re.search(r"\bxp\b|\bcupy\b", text):
            used |= set(re.findall(r"\b(?:xp|cupy)\.((?:\w+\.)*[a-zA-Z]\w*)", text))
    assert "cuda.Device" in used and "matmul" in used
    assert missing(used) == []
