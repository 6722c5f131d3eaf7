"""CUDA programs compiled by g++ and run on a CPU, in the shape of cupy.RawModule.

Arrays are NumPy's. What a kernel is given lies between red zones that must stay as they
are; they hold NaN, so that a number read from there shows.
"""

import atexit
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
GXX = shutil.which("g++")
FLAGS = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", f"-I{HERE}"]
ZONE = 512  # bytes before and behind an array
FILL = 0xFF


class ShimError(Exception):
    """A kernel wrote outside of its arrays, or its threads wait for each other."""


class Module:
    """A compiled program; `backwards` runs the threads of a block in that order."""

    def __init__(self, library: ctypes.CDLL, names: tuple[str, ...], backwards: bool):
        self.library, self.names, self.backwards = library, names, backwards

    def get_function(self, name: str) -> "Function":
        entry = getattr(self.library, f"entry{self.names.index(name)}")
        entry.restype = ctypes.c_char_p
        return Function(name, entry, self.backwards)


class Function:
    """A kernel, called as CuPy's are."""

    max_dynamic_shared_size_bytes = 0

    def __init__(self, name: str, entry: Any, backwards: bool) -> None:
        self.name, self.entry, self.backwards = name, entry, backwards

    def __call__(self, grid, block, arguments, *, shared_mem=0):
        # A kernel has 48 KiB without asking, of which static arrays are a part
        if shared_mem > max(40 << 10, self.max_dynamic_shared_size_bytes):
            raise ShimError(f"{self.name}: shared memory that was not asked for")
        zones = Zones([a for a in arguments if isinstance(a, np.ndarray)])
        values = [self._value(a, zones) for a in arguments]
        addresses = [ctypes.addressof(value) for value in values]
        sizes = [(*size, 1, 1)[:3] for size in (grid, block)]
        error = self.entry(
            (ctypes.c_uint * 6)(*sizes[0], *sizes[1]), ctypes.c_size_t(shared_mem),
            (ctypes.c_void_p * len(values))(*addresses), ctypes.c_int(self.backwards),
        )  # fmt: skip
        if error:
            raise ShimError(f"{self.name}: {error.decode()}")
        zones.take_back(self.name)

    def _value(self, argument: Any, zones: "Zones") -> Any:
        if isinstance(argument, np.ndarray):
            return ctypes.c_void_p(zones.address(argument))
        return np.ctypeslib.as_ctypes_type(argument.dtype)(argument.item())


class Zones:
    """Copies of memory with red zones; arrays that overlap share a copy."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.copies: list[tuple[int, int, np.ndarray]] = []
        spans = sorted(np.lib.array_utils.byte_bounds(a) for a in arrays)
        joined: list[list[int]] = []
        for low, high in spans:
            if joined and low < joined[-1][1]:
                joined[-1][1] = max(high, joined[-1][1])
            else:
                joined.append([low, high])
        for low, high in joined:
            # The copy is aligned as the array is
            copy = np.full(high - low + 2 * ZONE + 64, FILL, np.uint8)
            shift = (low - copy.ctypes.data) % 64
            copy = copy[shift : shift + high - low + 2 * ZONE]
            ctypes.memmove(copy.ctypes.data + ZONE, low, high - low)
            self.copies.append((low, high, copy))

    def address(self, array: np.ndarray) -> int:
        at = array.ctypes.data
        if array.size == 0:
            return 0
        low, _, copy = next(c for c in self.copies if c[0] <= at < c[1])
        return copy.ctypes.data + ZONE + at - low

    def take_back(self, name: str) -> None:
        for low, high, copy in self.copies:
            if (copy[:ZONE] != FILL).any() or (copy[-ZONE:] != FILL).any():
                raise ShimError(f"{name}: wrote outside of its arrays")
            ctypes.memmove(low, copy.ctypes.data + ZONE, high - low)


@cache
def library(text: str, names: tuple[str, ...]) -> ctypes.CDLL:
    """The program as a shared library."""
    exports = [f"EXPORT(entry{i}, {name})" for i, name in enumerate(names)]
    code = "\n".join(['#include "cuda.h"', text, *exports])
    return ctypes.CDLL(str(built(code)))


@cache
def cublaslt() -> str:
    """Path of the library that stands for cuBLASLt."""
    return str(built((HERE / "cublaslt.cpp").read_text()))


def built(code: str) -> Path:
    """A shared library.

    It is kept in the folder that CUDA_SHIM_CACHE names, for all processes of a job, or
    in one that goes with the process.
    """
    folder = Path(os.environ.get("CUDA_SHIM_CACHE") or FOLDER.name)
    file = folder / f"{hashlib.sha256(code.encode()).hexdigest()[:16]}.so"
    # Ranks that need the same program wait for the first one
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _compile(code, file)
    return file


def _compile(code: str, built: Path) -> None:
    file, made = built.with_suffix(".cpp"), built.with_suffix(".new")
    file.write_text(code)
    command = [GXX, *FLAGS, str(file), "-o", str(made)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    made.rename(built)


FOLDER = tempfile.TemporaryDirectory(prefix="shim")
atexit.register(FOLDER.cleanup)
