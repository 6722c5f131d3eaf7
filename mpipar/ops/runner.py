"""How kernels are run: by a team of threads, over rows."""

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.ops.base import Ops
from mpipar.ops.half import FP16, is_half
from mpipar.ops.kernels.compile import kernel_type, load
from mpipar.ops.team import Team


def keep_freed_memory() -> None:
    """Tell glibc to keep freed arrays: fresh pages cost a zeroing on every step.

    Raises malloc's thresholds M_MMAP_THRESHOLD (-3) and M_TRIM_THRESHOLD (-1); nothing
    happens where the C library has no mallopt.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(ctypes.c_int(-3), ctypes.c_int(1 << 30))
    mallopt(ctypes.c_int(-1), ctypes.c_int(2**31 - 1))


class KernelOps(Ops):
    """What CPU ops are built on.

    dtype     compute type, float32 or float64;  half  as in `Ops`
    threads   that share each operation
    """

    def __init__(self, dtype: str, threads: int, half: str | None = None) -> None:
        super().__init__(np, dtype, half)
        keep_freed_memory()
        load(self.dtype, self.operand_dtype)
        self.team = Team(threads)

    def _by_rows(self, kernel: Callable, first: np.ndarray, *rest: Any) -> None:
        """kernel(first, *rest, lo, hi) for all rows of `first`, shared by threads."""
        first, *rest = self._seen(first, *rest)
        self.team.share(
            len(first), lambda lo, hi, _: kernel(first, *rest, lo, hi), first.size
        )

    def _summed(
        self,
        kernel: Callable,
        *inputs: np.ndarray,
        sums: list[np.ndarray],
        after: tuple = (),
        chunk: int = 256,
    ) -> None:
        """As `_by_rows` for a kernel that adds to `sums`.

        Every `chunk` rows have partial sums of their own: rounding errors stay small,
        and results do not depend on the number of threads.
        """
        inputs, after = self._seen(*inputs), self._seen(*after)
        rows = len(inputs[0])
        chunks = -(-rows // chunk)
        types = [self.dtype if is_half(x.dtype) else x.dtype for x in sums]
        parts = [
            np.zeros((chunks, x.size), dtype)
            for x, dtype in zip(sums, types, strict=True)
        ]

        def work(first: int, last: int, _: int) -> None:
            for at in range(first, last):
                own = (part[at] for part in parts)
                stop = min(rows, (at + 1) * chunk)
                kernel(*inputs, *own, *after, at * chunk, stop)

        self.team.share(chunks, work, inputs[0].size)
        for total, part in zip(sums, parts, strict=True):
            self.add_to(total, part.sum(axis=0))

    def _seen(self, *arguments: Any) -> Sequence[Any]:
        """What kernels are given: fp16 as int16."""
        if self.operand_dtype != FP16:
            return arguments
        return [as_bits(x) if isinstance(x, np.ndarray) else x for x in arguments]

    def _over(self, x: np.ndarray) -> np.ndarray:
        """Where an operand made from x goes: over x itself if of its type."""
        return x if self.operand_dtype == x.dtype else self.empty_operand(x.shape)


def as_bits(x: np.ndarray) -> np.ndarray:
    """A view of the type that kernels take."""
    return x.view(kernel_type(x.dtype))


def rows_of(x: np.ndarray) -> np.ndarray:
    """(rows, width) of an array, contiguous; a copy only where it is not."""
    return np.ascontiguousarray(x).reshape(_rows(x))


def spaced_rows(x: np.ndarray) -> np.ndarray:
    """A view (rows, width) of an array whose rows are evenly spaced.

    Raises ValueError where there is no such view.
    """
    return np.reshape(x, _rows(x), copy=False)


def _rows(x: np.ndarray) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


def optional(onto: np.ndarray | None, like: np.ndarray) -> tuple[np.ndarray, bool]:
    """What to add and whether to, as kernels take it."""
    return rows_of(like if onto is None else onto), onto is not None
