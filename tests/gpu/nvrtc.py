"""CUDA programs compiled by NVRTC, which needs neither a GPU nor a driver."""

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

# As CuPy has them
OPTIONS = ("-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v")


@cache
def library() -> ctypes.CDLL:
    """NVRTC; the test is skipped where its wheel is not installed."""
    found = importlib.util.find_spec("nvidia")
    for room in found.submodule_search_locations if found else ():
        for file in Path(room).glob("cuda_nvrtc/lib/libnvrtc.so.*"):
            return ctypes.CDLL(str(file))
    pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")


def build(text: str, names: tuple[str, ...], options: tuple[str, ...]) -> str:
    """Compiles the kernels named and returns what ptxas says of each.

    Raises ValueError, with the compiler's messages, where they do not compile.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    words = [option.encode() for option in (*OPTIONS, *options)]
    _check(nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None
    ))  # fmt: skip
    try:
        for name in names:
            _check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        listed = (ctypes.c_char_p * len(words))(*words)
        status = nvrtc.nvrtcCompileProgram(program, len(words), listed)
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        if status:
            raise ValueError(log.value.decode())
        return log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC returned error {status}")


def spilled(log: str) -> list[int]:
    """Bytes that each kernel of a log spills from registers to memory."""
    stores = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return [int(a) + int(b) for a, b in stores]
