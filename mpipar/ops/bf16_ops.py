"""CPU ops whose matrix products read bf16; everything else is float32."""

import numpy as np

from mpipar.ops.blas import fill
from mpipar.ops.kernels import elementwise
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.onednn import Products


class Bf16Ops(NumpyOps):
    """NumpyOps in float32, with operands of products in bf16 and their sums in float32.

    Norms, activations and attention write the bits that the next product reads, so that
    an array is rounded once, where it is made. Attention's own products are float32.

    Raises   DeviceError where the CPU or oneDNN cannot do it (`onednn.why_not`)
    """

    operand_dtype = np.dtype(np.uint16)

    def __init__(self, threads: int = 1) -> None:
        self._products = [Products() for _ in range(threads)]
        self._prepared: set[int] = set()
        super().__init__("float32", threads)

    def operand(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if x.dtype == self.operand_dtype:
            return x
        out = self.empty_operand(x.shape) if out is None else out
        width = x.shape[-1]
        rows, bits = (a.reshape(-1, width) for a in (np.ascontiguousarray(x), out))
        self._by_rows(elementwise.narrow_rows, rows, bits)
        return out

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
