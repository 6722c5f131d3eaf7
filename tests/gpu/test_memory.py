"""Memory of the device: counted, the same in each step, and an end that says why."""

import re
import subprocess
import sys
import tempfile

import pytest
from faults.run import RECIPE, SCRIPT
from gpu.emulator.path import environment
from gpu.shim.compile import GXX

KERNELS = tempfile.TemporaryDirectory(prefix="kernels")
pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

SET_UP = """
import numpy as np
from cupy.cuda import streams
from mpipar.engine import Engine
from mpipar.grid import serial_grid
from mpipar.ops import make_ops
from parity.build import count_valid, make_batch, make_recipe, scatter, serial_recipe

def build(*words):
    recipe = serial_recipe(make_recipe(1, *words))
    engine = Engine(recipe, serial_grid(), make_ops("cuda", recipe.train.precision))
    batch = make_batch(engine.recipe, 0)
    return engine, lambda: engine.step([batch], count_valid(batch))
"""


def run(code: str, status: int = 0, **words: str) -> str:
    """What a process with the emulator prints; its errors where it is to fail."""
    command = [sys.executable, "-W", "error", "-c", SET_UP + code]
    own = environment(CUDA_SHIM_CACHE=KERNELS.name, **words)
    result = subprocess.run(
        command, env=own, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == status, result.stderr
    return result.stderr if status else result.stdout


STEPS = """
engine, step = build("train.precision=bf16", "model.family=llama")
ops, pool = engine.ops, engine.ops.gpu.pool
taken, plain, peaks = [], pool.malloc, []
pool.malloc = lambda size: taken.append(plain(size)) or taken[-1]
# The first one makes what is kept
step()
asked, calls, before = pool.reservations, streams.counts["mallocs"], []
for _ in range(2):
    taken.clear()
    pool.reset_peak()
    step()
    assert before in ([], taken), "a step found its arrays elsewhere"
    before = list(taken)
    peaks.append(ops.device_memory()["device_peak"])
assert (pool.reservations, streams.counts["mallocs"]) == (asked, calls)
state = {k: n for k, n in engine.held_memory().items() if k != "activations"}
predicted = engine.predicted_memory()
assert engine.executor.peak_bytes == predicted["activations_peak"]
assert sum(state.values()) == sum(predicted.values()) - predicted["activations_peak"]
# Between steps nothing is there but the state, and what is made once
assert 0 <= pool.now - sum(state.values()) < 16 * 512, pool.now
assert peaks[0] == peaks[1] >= sum(predicted.values())
assert ops.device_memory()["device_workspace"] >= 32 << 20
print("counted")
"""


def test_a_step_takes_the_same_memory_each_time_and_asks_for_none():
    assert run(STEPS) == "counted\n"


SMALL = """
build("model.context=4096", "model.width=256")[1]()
"""


def test_too_little_memory_is_told_by_what_holds_it():
    said = run(SMALL, 1, CUPY_EMULATOR_MEMORY=str(160 << 20))
    *_, last = said.strip().splitlines()
    for words in (
        "DeviceMemoryError: GPU 0 (Emulated GPU) has too little memory:",
        "MiB are asked for", "of 160 MiB are free", "this rank holds", "params",
        "optimizer", "train.micro_batch", "parallel.zero",
    ):  # fmt: skip
        assert words in last, last


def test_too_little_memory_ends_the_job_in_one_line_of_a_rank(job, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "corpus.txt").write_text("".join(map(chr, range(32, 127))) * 60)
    words = ["train.device=cuda", "train.global_batch=256", "parallel.zero=1"]
    done = job(
        2, *SCRIPT, "train", "recipe.toml", "--out", "run", *words, cwd=tmp_path,
        timeout=120, **environment(CUPY_EMULATOR_MEMORY=str(24 << 20)),
    )  # fmt: skip
    # Each of two ranks has a quarter: so small a device is half taken by contexts
    assert done.status == 4, done.output
    told = [line for line in done.output.splitlines() if "too little memory" in line]
    assert 1 <= len(told) <= 2 and "Traceback" not in done.output, done.output
    assert re.match(r"\[rank [01] of 2, \S+\] GPU 0 \(Emulated GPU\)", told[0]), told
    assert "params" in told[0] and "train.recompute" in told[0], told


# A save copies the state beside the next step, whose update must wait for it.
SAVE = """
from mpipar.checkpoint.snapshot import Snapshot
from mpipar.ops.cuda.gpu import GpuOps
engine, step = build("train.precision=bf16", "model.family=llama")
snapshot = Snapshot(engine.ops)
engine.before_update = snapshot.freeze

def is_right():
    state = [f.arrays[kind] for f in engine.fragments() for kind in f.arrays]
    want = np.concatenate([x.get() for x in state])
    waits = streams.counts["waits"]
    snapshot.begin(state)
    assert streams.counts["waits"] == waits, "the host waited"
    step()
    engine.ops.synchronize()
    got = np.concatenate([part.copy() for part in snapshot.parts()])
    snapshot.begin([])
    assert not np.array_equal(np.concatenate([x.get() for x in state]), want)
    return np.array_equal(got, want)

print(is_right())
GpuOps.wait = lambda self, event: None
print(is_right())
"""


def test_a_save_has_the_state_as_it_was_only_if_the_update_waits_for_it():
    assert run(SAVE) == "True\nFalse\n"
