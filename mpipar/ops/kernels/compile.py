"""How kernels are compiled: once for each floating-point type, kept on disk.

A kernel is a Python function that Numba compiles for the CPU it runs on. Its signature
is written with letters, so that one text serves all precisions:

    T   the compute type, float32 or float64
    O   the operand type: T, or the bits of bf16 (uint16) or of fp16 (int16)
    G   gradients, and outputs that may be of either type: compiled for T and for O

Compiled code is kept under the user's cache folder, by a hash of these sources; only
the first run on a machine waits for the compiler.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

# Sums may be reordered and fused; quotients stay exact, NaN and infinity what they are.
_FAST_MATH = {"reassoc", "nsz", "contract"}
_DECLARED: list[tuple[Any, str]] = []
_LOADED: set[tuple[np.dtype, np.dtype]] = set()


def kernel(signature: str, *, when: bool = True) -> Callable[[Callable], Any]:
    """Declares a kernel; `load` compiles it. It runs without the interpreter lock.

    when   False where this CPU cannot run it
    """

    def declare(function: Callable) -> Any:
        compiled = numba.njit(
            cache=True, nogil=True, fastmath=_FAST_MATH, error_model="numpy"
        )(function)
        if when:
            _DECLARED.append((compiled, signature))
        return compiled

    return declare


def part(function: Callable) -> Any:
    """A function that kernels call; it is compiled into them."""
    return numba.njit(nogil=True, fastmath=_FAST_MATH, error_model="numpy")(function)


def load(compute: np.dtype, operand: np.dtype) -> None:
    """Compiles every kernel for these types, or reads it from the cache folder.

    compute   float32 or float64
    operand   the same, uint16 for bf16 or float16
    """
    bits = kernel_type(operand)
    if (compute, operand) in _LOADED:
        return
    _LOADED.add((compute, operand))
    for compiled, signature in _DECLARED:
        text = signature.replace("O", bits.name).replace("T", compute.name)
        compiled.disable_compile(False)
        for gradient in {compute, bits} if "G" in text else {compute}:
            compiled.compile(f"void{text.replace('G', gradient.name)}")
        compiled.disable_compile()


def kernel_type(dtype: np.dtype) -> np.dtype:
    """What kernels take arrays of this type for: Numba knows no fp16 on CPUs."""
    return np.dtype(np.int16) if dtype == np.float16 else dtype


def _choose_cache_folder() -> str:
    """The user's cache folder, or a temporary one where that is read-only."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"kernels-{digest.hexdigest()[:12]}"
    for root in (
        Path(base, "mpipar"),
        Path(tempfile.gettempdir(), f"mpipar-{os.getuid()}"),
    ):
        folder = root / name
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
        except OSError:
            continue
        # What is read from there is run: it must be our own.
        if root.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return str(folder)
    return tempfile.mkdtemp(prefix="mpipar-")


numba.config.CACHE_DIR = _choose_cache_folder()
