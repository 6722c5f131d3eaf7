"""The emulated CuPy behaves as a GPU may: late, and apart from NumPy."""

import subprocess
import sys

import pytest
from gpu.emulator.path import environment
from gpu.shim.compile import GXX

SET_UP = """
import cupy, cupyx, numpy as np
stream = cupy.cuda.Stream(non_blocking=True)
pinned = cupyx.zeros_pinned(4, "f4")
x = cupy.arange(4, dtype="f4")
"""


def run(code: str, devices: int = 1) -> str:
    """What a process with the emulator prints."""
    command = [sys.executable, "-W", "error", "-c", SET_UP + code]
    result = subprocess.run(
        command, env=environment(devices), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_copy_has_not_happened_before_its_stream_was_waited_for():
    code = "x.get(stream=stream, out=pinned, blocking=False)\nprint(pinned.sum(), "
    assert run(code + "stream.synchronize() or pinned.sum())") == "0.0 6.0"


def test_pinned_memory_is_read_when_the_copy_is_done():
    code = "x.set(pinned, stream=stream); pinned += 1; stream.synchronize(); print(x)"
    assert run(code) == "emulated array([1., 1., 1., 1.], dtype=float32)"


def test_another_stream_sees_work_only_after_its_event():
    code = """
pinned += 1
x.set(pinned, stream=stream)
event = stream.record()
print(float(x.sum()))
cupy.cuda.get_current_stream().wait_event(event)
print(float(x.sum()), event.done)
"""
    assert run(code) == "6.0\n4.0 True"


def test_freed_memory_is_used_again_before_other_streams_have_read_it():
    code = """
stream.wait_event(cupy.cuda.get_current_stream().record())
x.get(stream=stream, out=pinned, blocking=False)
del x
y = cupy.zeros(4, dtype="f4")
stream.synchronize()
print(pinned.sum())
"""
    assert run(code) == "0.0"


@pytest.mark.parametrize(
    "line",
    ["x + np.ones(4)", "np.asarray(x)", "cupy.exp(np.ones(4))", "x[:] = x.get()"],
)
def test_arrays_do_not_mix_with_those_of_numpy(line):
    code = f"try:\n    {line}\nexcept TypeError:\n    print('refused')"
    assert run(code) == "refused"


def test_memory_and_devices_end():
    code = """
print(cupy.cuda.runtime.getDeviceCount())
try:
    cupy.empty(5 << 30, "u1")
except cupy.cuda.memory.OutOfMemoryError as error:
    print("Out of memory" in str(error))
"""
    assert run(code, devices=3) == "3\nTrue"


TRAIN = """
import numpy as np
from cupy.cuda import streams
from mpipar.engine import Engine
from mpipar.grid import serial_grid
from mpipar.ops import Ops, make_ops
from parity.build import count_valid, make_batch, make_recipe, scatter, serial_recipe

def train(ops):
    words = ["train.precision=fp64", "model.dropout=0.1", "model.family=" + family]
    recipe = serial_recipe(make_recipe(1, *words))
    engine = Engine(recipe, serial_grid(), ops)
    scatter(engine)
    batch = make_batch(engine.recipe, 0)
    steps = []
    for _ in range(3):
        before = dict(streams.counts)
        steps.append(engine.step([batch], count_valid(batch)))
        # The square norm and the loss, both when nothing is left to be done
        waits = streams.counts["waits"] - before["waits"]
        assert waits == (0 if ops.on_host else 2), waits
    return np.array([[step.loss, step.grad_norm] for step in steps])

for family in ("gpt", "llama"):
    got, want = train(make_ops("cuda", "fp64")), train(Ops())
    assert len(set(want[:, 0])) == 3
    assert np.allclose(got, want, rtol=1e-10, atol=0), (got, want)
print("equal")
"""


@pytest.mark.skipif(GXX is None, reason="needs g++")
def test_a_model_trains_through_the_real_ops_of_cupy():
    assert run(TRAIN) == "equal"
