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
        b = None if b is None else self._solid(b)
        onto = None if onto is None else self._compute(onto)
        types = [self.dtype, self.dtype if b is None else b.dtype]
        self.launch.over_rows(
            "add_rows", types, rows, y.shape[-1],
            y, b, onto, step,
        )  # fmt: skip
        return y

    def linear_db(self, dy: Array, db: Array) -> None:
        x = self._solid(dy).reshape(-1, dy.shape[-1])
        chunks, size = chunks_of(len(x))
        sums = self.empty((1, chunks, x.shape[1]))
        self.launch.column_sums(x, sums[0], size)
        self._add_sums(sums, [db])

    def _add_sums(self, sums: Array, grads: list[Array]) -> None:
        """grads[i] += Σ of the rows of sums[i].   sums (grads, rows, width)"""
        solid = [self._solid(grad) for grad in grads]
        self.launch.add_column_sums(sums, solid)
        for grad, made in zip(grads, solid, strict=True):
            if made is not grad:
                grad[...] = made

    # --- activations ------------------------------------------------------------------

    def gelu_fwd(self, x: Array, *, tanh: bool) -> tuple[Array, Array]:
        x, y = self._either(x), self.empty_operand(x.shape)
        slope = self.empty_operand(x.shape)
        types = [x.dtype, self.dtype, self.operand_dtype, tanh]
        self.launch.over_items("gelu_fwd", types, x.size, x, y, slope)
        return y, slope

    def gelu_dx(self, dy: Array, slope: Array) -> Array:
        dy = self._in_place(dy, self.dtype, self.operand_dtype)
        dx, slope = self._over(dy), self._solid(self.operand(slope))
        types = [dy.dtype, self.operand_dtype]
        self.launch.over_items("gelu_bwd", types, dy.size, dy, slope, dx)
        return dx

    def swiglu_fwd(self, gate: Array, up: Array) -> Array:
        y, width = self.empty_operand(gate.shape), gate.shape[-1]
        (rows, gate_step), (_, up_step) = spaced(gate), spaced(up)
        self.launch.over_rows(
            "swiglu_fwd", [gate.dtype, self.dtype, self.operand_dtype], rows, width,
            gate, up, y, gate_step, up_step,
        )  # fmt: skip
        return y

    def swiglu_dx(
        self, dy: Array, gate: Array, up: Array, *, dgate: Array, dup: Array
    ) -> None:
        rows, width, dy = spaced(gate)[0], gate.shape[-1], self._either(dy)
        steps = (spaced(x)[1] for x in (gate, up, dgate, dup))
        self.launch.over_rows(
            "swiglu_bwd", [dy.dtype, gate.dtype, self.dtype, dgate.dtype], rows, width,
            dy, gate, up, dgate, dup, *steps,
        )  # fmt: skip
