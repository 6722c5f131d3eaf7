"""CPU ops in bf16 through oneDNN, on CPUs with instructions for its products."""

import numpy as np

from mpipar.ops.blas import fill
from mpipar.ops.half_ops import HalfOps
from mpipar.ops.onednn import Products


class Bf16Ops(HalfOps):
    """HalfOps in bf16 whose products are made of 16-bit factors, sums in float32.

    Raises   DeviceError where the CPU or oneDNN cannot do it (`onednn.why_not`)
    """

    def __init__(self, threads: int = 1) -> None:
        self._products = [Products() for _ in range(threads)]
        self._prepared: set[int] = set()
        super().__init__("bf16", threads)

    def _multiply(
        self,
        a: np.ndarray,
        b: np.ndarray,
        out: np.ndarray,
        thread: int,
        *,
        bias: np.ndarray | None = None,
        onto: np.ndarray | None = None,
    ) -> None:
        products = self._products[thread]
        if thread not in self._prepared:
            # OpenMP counts threads for each calling thread; the team has its own.
            products.set_threads(1)
            self._prepared.add(thread)
        if onto is None:
            products.multiply(a, b, out, bias=bias)
        else:
            fill(out, bias, onto)
            products.multiply(a, b, out, accumulate=True)
