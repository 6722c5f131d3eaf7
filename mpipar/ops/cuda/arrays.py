"""Arrays as kernels take them: types, gaps, indices."""

from types import ModuleType
from typing import Any

import numpy as np

from mpipar.ops.base import Ops
from mpipar.ops.cuda.launch import Launcher
from mpipar.ops.cuda.programs import Compile

Array = Any

# Rows of 16-bit numbers that are no multiple of so many items are slow to read and to
# write. Where they are long, as those of an odd vocabulary, what is too much of them is
# a small product of its own, and rows that are made lie at multiples.
COLUMNS, LONG = 8, 1024


class CudaArrayOps(Ops):
    """What the kernels' ops stand on: their launcher, and arrays as kernels take them.

    xp        array module;  compile  makes a module of a program (`programs.Compile`)
    dtype, half   as in `Ops`
    """

    def __init__(
        self, xp: ModuleType, compile: Compile, dtype: str, half: str | None = None
    ) -> None:
        super().__init__(xp, dtype, half)
        self.launch = Launcher(compile, self.dtype, self.operand_dtype)

    # --- types ------------------------------------------------------------------------

    def wide(self, x: Array) -> Array:
        if x.dtype == self.dtype or x.dtype != self.operand_dtype:
            return x
        x, out = self._solid(x), self.empty(x.shape)
        self.launch.over_items("cast", [x.dtype, self.dtype], x.size, x, out)
        return out

    def store(self, x: Array, out: Array) -> Array:
        if x.dtype == out.dtype:
            out[...] = x
            return out
        x, flat = self._solid(x), out
        if not out.flags.c_contiguous:
            flat = self.xp.empty(out.shape, out.dtype)
        types = [x.dtype, out.dtype]
        self.launch.over_items("cast", types, x.size, x, flat)
        if flat is not out:
            out[...] = flat
        return out

    def add_to(self, grad: Array, x: Array) -> None:
        if not grad.flags.c_contiguous:
            grad[...] = self._sum(self.xp.ascontiguousarray(grad), x)
        else:
            self._sum(grad, x)

    def _sum(self, grad: Array, x: Array) -> Array:
        types = [self.dtype, grad.dtype]
        self.launch.over_items("add_to", types, x.size, grad, self._compute(x))
        return grad

    # --- arrays -----------------------------------------------------------------------

    def _solid(self, x: Array) -> Array:
        """x without gaps, as most kernels take it; a copy only where it has some."""
        return self.xp.ascontiguousarray(x)

    def _compute(self, x: Array) -> Array:
        """x in the compute type without gaps.   Raises TypeError for a third type"""
        x = self._solid(self.wide(x))
        if x.dtype != self.dtype:
            raise TypeError(f"an array of {x.dtype} where kernels take {self.dtype}")
        return x

    def _either(self, x: Array) -> Array:
        """x without gaps, in the compute type or that of operands.

        Raises TypeError for a third type.
        """
        return self._solid(x) if x.dtype == self.operand_dtype else self._compute(x)

    def _in_place(self, x: Array, *types: np.dtype) -> Array:
        """x, to be written; of the compute type unless others are given.

        Raises ValueError where it has gaps, TypeError where it has another type.
        """
        if not x.flags.c_contiguous:
            raise ValueError(f"an array of {x.shape} items to be written has gaps")
        if x.dtype not in (types or (self.dtype,)):
            raise TypeError(f"an array of {x.dtype} to be written in place")
        return x

    def _spaced_operand(self, shape: tuple[int, ...]) -> Array:
        """An uninitialised operand, its rows where every algorithm can write them."""
        *rows, width = shape
        if width < LONG or width % COLUMNS == 0:
            return self.empty_operand(shape)
        padded = self.empty_operand((*rows, -(-width // COLUMNS) * COLUMNS))
        return padded[..., :width]

    def _index(self, x: Array) -> Array:
        """Indices as kernels take them, on this device."""
        return self.xp.ascontiguousarray(self.xp.asarray(x), dtype=np.int64)

    def _over(self, x: Array) -> Array:
        """Where an operand made from x goes: over x itself if of its type."""
        return x if x.dtype == self.operand_dtype else self.empty_operand(x.shape)


def spaced(x: Array) -> tuple[int, np.int64]:
    """How many rows an array has, and how many items lie from one to the next.

    Raises ValueError where rows are not evenly spaced, or items not side by side.
    """
    rows, step = 1, x.shape[-1]
    even = x.shape[-1] == 1 or x.strides[-1] == x.itemsize
    for size, stride in zip(x.shape[-2::-1], x.strides[-2::-1], strict=True):
        if size == 1:
            continue
        if rows == 1:
            step = stride // x.itemsize
        even &= stride == rows * step * x.itemsize
        rows *= size
    if not even:
        raise ValueError(f"rows of {x.shape} items with strides {x.strides} are uneven")
    return rows, np.int64(step)
