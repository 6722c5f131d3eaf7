"""cupy.RawModule: kernels compiled by g++, launched into the current stream."""

from typing import Any

import numpy as np
from gpu.shim.compile import Module, library

from cupy._array import ndarray
from cupy.cuda import streams


class RawModule:
    """A program whose kernels are run on the CPU."""

    def __init__(
        self,
        code: str,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: tuple[str, ...] | None = None,
    ) -> None:
        names = tuple(name_expressions)
        self._module = Module(library(code, names), names, backwards=False)

    def get_function(self, name: str) -> "RawKernel":
        return RawKernel(self._module.get_function(name))


class RawKernel:
    """A kernel."""

    def __init__(self, function: Any) -> None:
        self._function = function

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._function.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._function.max_dynamic_shared_size_bytes = size

    def __call__(self, grid, block, args, *, shared_mem: int = 0) -> None:
        if any(isinstance(a, np.ndarray) and a.ndim for a in args):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        values = [a.host if isinstance(a, ndarray) else a for a in args]
        for value in values:
            if not isinstance(value, np.ndarray | np.generic):
                raise TypeError(f"{type(value)} has no exact size for a kernel")

        def run() -> None:
            self._function(grid, block, values, shared_mem=shared_mem)

        streams.counts["launches"] += 1
        streams.current().submit(run)
