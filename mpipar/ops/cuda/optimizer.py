"""Passes over flat buffers by CUDA kernels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.ops.cuda.arrays import CudaArrayOps
from mpipar.ops.cuda.launch import SUM_BLOCKS

Array = Any


class CudaOptimizerOps(CudaArrayOps):
    """Sums of ranks, norms of gradients, AdamW and its rounding, over flat buffers."""

    def sum_rows(self, rows: Array, out: Array) -> None:
        self.launch.over_items(
            "sum_rows", [rows.dtype, out.dtype], out.size, rows, len(rows), out
        )

    def square_sum(self, x: Array) -> float:
        return self.square_sums([x])

    def square_sums(self, arrays: Sequence[Array]) -> float:
        sums = self.xp.zeros((len(arrays), SUM_BLOCKS))
        for x, own in zip(arrays, sums, strict=True):
            self.launch.over_items(
                "square_sums", [x.dtype], x.size, x, own, blocks=SUM_BLOCKS
            )
        return float(self.to_host(sums).sum())

    def adamw(
        self,
        weight: Array,
        grad: Array,
        m: Array,
        v: Array,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        step: int,
        scale: float,
        rounded: Array | None = None,
    ) -> None:
        numbers = (
            lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step),
            beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, 1.0 - lr * decay, scale,
        )  # fmt: skip
        self.launch.over_items(
            "adamw", [self.dtype, grad.dtype, self.operand_dtype], weight.size,
            weight, grad, m, v, rounded, *(float(number) for number in numbers),
        )  # fmt: skip

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
        numbers = (np.int64(number) for number in (begin, *rows, step, *key))
        self.launch.over_items(
            "round_stochastic", [out.dtype], x.size,
            self._in_place(x), self._in_place(out, self.operand_dtype), *numbers,
        )  # fmt: skip
