"""Random numbers as array operations: dropout factors and starting weights."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from mpipar.ops.half import narrow_stochastic
from mpipar.ops.philox import normal_at, stream_key, uniform_rows, words_at

Array = Any
_BLOCK = 1 << 15  # items that are rounded at a time, in the cache


class RandomOps:
    """The random operations of `Ops`, which gives it xp, dtype, asarray and store."""

    xp: ModuleType
    dtype: np.dtype
    store: Callable[[Array, Array], Array]

    def dropout_scale(
        self,
        rate: float,
        width: int,
        rows: tuple[Array, Array, Array],
        key: tuple[int, int],
        *,
        start: int = 0,
    ) -> Array:
        """1/(1 − rate) where an element is kept, 0 where it is dropped.

        Element (r, j) depends on (key, rows[r], start + j) alone.   →  (..., width)
        """
        u = uniform_rows(width, rows, key, self.xp, start)
        return (u >= rate).astype(self.dtype) * self.dtype.type(1.0 / (1.0 - rate))

    def dropout(
        self,
        x: Array,
        rate: float,
        rows: tuple[Array, Array, int],
        key: tuple[int, int],
        *,
        onto: Array | None = None,
    ) -> Array:
        """y = x·m + onto, m as `dropout_scale` has it for (positions, samples, number).

        Shapes   x, onto, y (b, s, d); rows: positions (s,), samples (b,), a number
        """
        positions, samples, number = rows
        rows = positions[None, :], samples[:, None], number
        y = x * self.dropout_scale(rate, x.shape[-1], rows, key)
        if onto is not None:
            y += onto
        return y

    def fill_normal(
        self,
        out: Array,
        *,
        std: float,
        seed: int,
        name: str,
        shape: tuple[int, ...],
        box: tuple[tuple[int, int], ...],
    ) -> None:
        """Fills `out` with the box of the global tensor `name` of N(0, std²) numbers.

        Shapes   out: the box's sizes; shape, box: global sizes and half-open intervals
        """
        xp = self.xp
        index = xp.zeros((1,) * len(shape), xp.int64)
        for dim, (lo, hi) in enumerate(box):
            stride = math.prod(shape[dim + 1 :])
            axis = [1] * len(shape)
            axis[dim] = hi - lo
            index = index + (xp.arange(lo, hi, dtype=xp.int64) * stride).reshape(axis)
        values = self._normals(index.reshape(-1), std, stream_key(seed, name))
        self.store(values.reshape(out.shape), out)

    def store_stochastic(
        self,
        x: Array,
        out: Array,
        *,
        begin: int,
        rows: tuple[int, int, int],
        step: int,
        key: tuple[int, int],
    ) -> None:
        """out = x, each element rounded up or down by a draw that depends on its index
        in the global tensor, the step and the key alone (`narrow_stochastic`).

        Element i is element e = begin + i of a rank's box, and of the tensor element
        first + e // width · stride + e % width.

        Shapes   x (n,) float32, out (n,) 16-bit; rows: first, width, stride
        """
        for lo in range(0, x.size, _BLOCK):
            part = slice(lo, min(lo + _BLOCK, x.size))
            size = part.stop - lo
            words = self._draws(begin + lo, size, rows, step, key)
            narrow_stochastic(x[part], words, out[part])

    def _draws(
        self,
        begin: int,
        size: int,
        rows: tuple[int, int, int],
        step: int,
        key: tuple[int, int],
    ) -> Array:
        """The words of `store_stochastic`.   (size,) uint32"""
        (first, width, stride), xp = rows, self.xp
        box = xp.arange(begin, begin + size, dtype=xp.int64)
        index = first + box // width * stride + box % width
        return words_at(index, step, key, xp)

    def _normals(self, index: Array, std: float, key: tuple[int, int]) -> Array:
        """N(0, std²) numbers of global element indices.   (n,)"""
        return (normal_at(index, key, self.xp) * std).astype(self.dtype)
