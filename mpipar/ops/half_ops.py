"""CPU ops in mixed precision: 16-bit operands, everything else float32."""

import numpy as np

from mpipar.ops.base import Ops
from mpipar.ops.half import is_half, narrow, widen
from mpipar.ops.kernels import elementwise
from mpipar.ops.numpy_ops import NumpyOps

# Columns of a factor that are float32 at a time.
WIDE = 1024


class HalfOps(NumpyOps):
    """NumpyOps with weights, weight gradients and operands of products in 16 bits.

    Norms, activations and attention write the bits that the next product reads, so that
    an array is rounded once, where it is made. Products turn their factors to float32:
    slow, and the same on every CPU. Attention's own products are float32.

    half   "bf16" or "fp16"
    """

    def __init__(self, half: str, threads: int = 1) -> None:
        super().__init__("float32", threads, half)

    def operand(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if x.dtype == self.operand_dtype:
            return super().operand(x, out)
        out = self.empty_operand(x.shape) if out is None else out
        flat = np.ascontiguousarray(x).reshape(-1)
        self._by_rows(elementwise.to_operand, flat, np.reshape(out, -1, copy=False))
        return out

    def store_stochastic(
        self,
        x: np.ndarray,
        out: np.ndarray,
        *,
        begin: int,
        rows: tuple[int, int, int],
        step: int,
        key: tuple[int, int],
    ) -> None:
        def work(lo: int, hi: int, _: int) -> None:
            Ops.store_stochastic(
                self, x[lo:hi], out[lo:hi], begin=begin + lo, rows=rows, step=step,
                key=key,
            )  # fmt: skip

        self.team.share(x.size, work, x.size)

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
        a = widen(a)
        for lo in range(0, b.shape[1], WIDE):
            own = slice(lo, lo + WIDE)
            part, target = widen(b[:, own]), out[:, own]
            narrows = is_half(target.dtype)
            sums = np.empty(target.shape, self.dtype) if narrows else target
            # Errors of NumPy are watched for each thread by itself.
            with np.errstate(over="ignore", invalid="ignore"):
                super()._multiply(
                    a, part, sums, thread,
                    bias=None if bias is None else bias[own],
                    onto=None if onto is None else widen(onto[:, own]),
                )  # fmt: skip
            if narrows:
                narrow(sums, target)

    def _scatter_add(
        self, target: np.ndarray, index: np.ndarray, rows: np.ndarray
    ) -> None:
        if is_half(target.dtype):
            # The reference adds up repeated rows before it rounds.
            Ops._scatter_add(self, target, index, rows)
        else:
            super()._scatter_add(target, index, rows)
