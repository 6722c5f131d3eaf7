"""How a process is made to find the emulated CuPy."""

import os
from pathlib import Path

from gpu.shim.compile import GXX, cublaslt

HERE = Path(__file__).parent
TESTS = HERE.parents[1]


def environment(devices: int = 1, **words: str) -> dict[str, str]:
    """The variables of a process that is to see so many GPUs."""
    there = [p for p in (os.environ.get("PYTHONPATH"),) if p]
    paths = os.pathsep.join([str(HERE), str(TESTS), *there])
    own = {"PYTHONPATH": paths, "CUPY_EMULATOR_DEVICES": str(devices)}
    if GXX is not None:
        own["MPIPAR_CUBLASLT"] = cublaslt()
    return {**os.environ, **own, **words}
