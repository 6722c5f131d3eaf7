"""Activations, biases and residuals by CUDA kernels."""

from typing import Any

from mpipar.ops.cuda.arrays import CudaArrayOps, spaced
from mpipar.ops.cuda.launch import chunks_of

Array = Any


class CudaElementwiseOps(CudaArrayOps):
    """What stands beside dense products, and activations."""

    def add_residual(self, y: Array, b: Array | None, onto: Array | None) -> Array:
        if b is None and onto is None:
            return y
        rows, step = spaced(y)
        b = None if b is None else self._compute(b)
        onto = None if onto is None else self._compute(onto)
        width = y.shape[-1]
        self.launch.over_rows(
            "add_rows", [self.dtype], rows, width,
            y, b, onto, step,
        )  # fmt: skip
        return y

    def linear_db(self, dy: Array, db: Array) -> None:
        self.add_to(db, self._column_sum(self._solid(dy).reshape(-1, dy.shape[-1])))

    def _column_sum(self, x: Array) -> Array:
        """Σ over rows in the compute type.   (rows, width)  →  (width,)"""
        while True:
            rows, width = x.shape
            chunks, size = chunks_of(rows)
            sums = self.empty((chunks, width))
            self.launch.column_sums(x, sums, size)
            if chunks == 1:
                return sums[0]
            x = sums

    # --- activations ------------------------------------------------------------------

    def gelu_fwd(self, x: Array, *, tanh: bool) -> tuple[Array, Array]:
        x, y = self._compute(x), self.empty_operand(x.shape)
        slope = self.empty_operand(x.shape)
        types = [self.dtype, self.operand_dtype, tanh]
        self.launch.over_items("gelu_fwd", types, x.size, x, y, slope)
        return y, slope

    def gelu_dx(self, dy: Array, slope: Array) -> Array:
        dx, slope = self._over(self._in_place(dy)), self._solid(self.operand(slope))
        types = [self.dtype, self.operand_dtype]
        self.launch.over_items("gelu_bwd", types, dy.size, dy, slope, dx)
        return dx

    def swiglu_fwd(self, gate: Array, up: Array) -> Array:
        y, width = self.empty_operand(gate.shape), gate.shape[-1]
        (rows, gate_step), (_, up_step) = spaced(gate), spaced(up)
        self.launch.over_rows(
            "swiglu_fwd", [self.dtype, self.operand_dtype], rows, width,
            gate, up, y, gate_step, up_step,
        )  # fmt: skip
        return y

    def swiglu_dx(
        self, dy: Array, gate: Array, up: Array, *, dgate: Array, dup: Array
    ) -> None:
        rows, width, dy = spaced(gate)[0], gate.shape[-1], self._compute(dy)
        steps = (spaced(x)[1] for x in (gate, up, dgate, dup))
        self.launch.over_rows(
            "swiglu_bwd", [self.dtype, dgate.dtype], rows, width,
            dy, gate, up, dgate, dup, *steps,
        )  # fmt: skip
