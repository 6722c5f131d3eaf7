"""The reference implementation of every array operation, written once against `xp`.

`xp` is NumPy or CuPy. Shapes use the letters of the README: b sequences, s positions,
d width, n query heads, g key/value heads, h head width, f ffn width, v vocabulary,
T = b*s tokens. Ops know nothing of parameters or communicators.

Conventions: inputs are positional, options and results to fill are keywords; an
argument that an op overwrites or adds to is named in its docstring.
"""

import math
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mpipar.ops.attention import AttentionOps
from mpipar.ops.device import DeviceOps
from mpipar.ops.half import HALVES, NAMES, is_half, narrow, widen
from mpipar.ops.norm import NormOps
from mpipar.ops.products import ProductOps
from mpipar.ops.random import RandomOps
from mpipar.ops.rows import RowOps

Array = Any

GELU_TANH_SCALE = math.sqrt(2.0 / math.pi)
GELU_TANH_CUBIC = 0.044715


class Ops(AttentionOps, DeviceOps, NormOps, ProductOps, RandomOps, RowOps):
    """Array maths on one device in one precision.

    xp              array module, NumPy or CuPy
    dtype           compute type, float32 or float64: of sums, of the residual stream
                    and of its gradient
    half            "bf16" or "fp16" for mixed precision (Micikevicius et al. 2018)
    operand_dtype   the 16-bit type of mixed precision, else dtype: type of weights, of
                    their gradients, and of arrays that only matrix products read

    Weights may be of either type wherever an op takes some. Gradients too; a sum that
    is added to them is rounded once.
    """

    def __init__(
        self, xp: ModuleType = np, dtype: str = "float64", half: str | None = None
    ) -> None:
        self.xp = xp
        self.dtype = self.operand_dtype = np.dtype(dtype)
        if half is not None:
            self.operand_dtype = HALVES[half]

    @property
    def precision(self) -> str:
        """What the recipe calls it: fp64, fp32, bf16 or fp16."""
        return NAMES.get(self.operand_dtype, f"fp{8 * self.dtype.itemsize}")

    @property
    def is_mixed(self) -> bool:
        """True where the operand type is a smaller one than the compute type."""
        return self.operand_dtype != self.dtype

    @property
    def attention_method(self) -> str:
        """Whose kernels work on attention, where there is a choice."""
        return ""

    @property
    def narrow_results(self) -> bool:
        """True where products that only the next op reads are best made operands."""
        return False

    def operand(self, x: Array, out: Array | None = None) -> Array:
        """x in the operand type, in `out` or a new array; x itself where it is."""
        if out is None:
            if x.dtype == self.operand_dtype:
                return x
            out = self.empty_operand(x.shape)
        return self.store(x, out)

    def wide(self, x: Array) -> Array:
        """x in the compute type; x itself where it is."""
        return widen(x)

    def store(self, x: Array, out: Array) -> Array:
        """out = x, of the compute type or that of out; returns out."""
        if x.dtype == out.dtype:
            out[...] = x
            return out
        return narrow(x, out)

    def add_to(self, grad: Array, x: Array) -> None:
        """grad += x, rounded once; x of the compute type."""
        if is_half(grad.dtype):
            narrow(widen(grad) + x, grad)
        else:
            grad += x

    def empty_operand(self, shape: tuple[int, ...]) -> Array:
        """An uninitialised array of the operand type."""
        return self.xp.empty(shape, self.operand_dtype)

    # --- making arrays ----------------------------------------------------------------

    def empty(self, shape: tuple[int, ...]) -> Array:
        """An uninitialised array of the compute type."""
        return self.xp.empty(shape, self.dtype)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """A zero array of the compute type."""
        return self.xp.zeros(shape, self.dtype)

    def to_host(self, x: Array) -> np.ndarray:
        """`x` as a NumPy array."""
        return x if isinstance(x, np.ndarray) else x.get()

    def matmul_rate(self, repeats: int = 4) -> float:
        """FLOP/s of a square product of operands here and now: the best of a few."""
        size = 768 if self.on_host else 4096
        # Two arrays: the product of one with itself would be computed by halves.
        a, b = (self.operand(self.xp.ones((size, size), self.dtype)) for _ in "ab")
        best = math.inf
        for _ in range(repeats):
            begin = time.perf_counter()
            self.linear_fwd(a, b)
            self.synchronize()
            best = min(best, time.perf_counter() - begin)
        return 2.0 * size**3 / best

    # --- activations ------------------------------------------------------------------

    def gelu_fwd(self, x: Array, *, tanh: bool) -> tuple[Array, Array]:
        """y = x Φ(x), and its slope dy/dx kept for the backward pass.

        tanh   True: the tanh form of Hendrycks & Gimpel 2016; False: the exact erf form
        """
        if tanh:
            z = GELU_TANH_SCALE * (x + GELU_TANH_CUBIC * x**3)
            t = self.xp.tanh(z)
            dz = GELU_TANH_SCALE * (1.0 + 3.0 * GELU_TANH_CUBIC * x**2)
            slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * dz
            return self.operand(0.5 * x * (1.0 + t)), self.operand(slope)
        phi = 0.5 * (1.0 + self.erf(x / math.sqrt(2.0)))
        density = self.xp.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return self.operand(x * phi), self.operand(phi + x * density)

    def gelu_dx(self, dy: Array, slope: Array) -> Array:
        """dx = dy · slope, an operand; overwrites dy."""
        dy *= self.wide(slope)
        return self.operand(dy)

    def swiglu_fwd(self, gate: Array, up: Array) -> Array:
        """y = gate σ(gate) · up.   Shazeer 2020, section 2.   (..., f) each"""
        return self.operand(gate / (1.0 + self.xp.exp(-gate)) * up)

    def swiglu_dx(
        self, dy: Array, gate: Array, up: Array, *, dgate: Array, dup: Array
    ) -> None:
        """Writes dgate = dy·up·σ(1 + gate(1−σ)) and dup = dy·gate·σ."""
        sigma = 1.0 / (1.0 + self.xp.exp(-gate))
        self.store(dy * up * sigma * (1.0 + gate * (1.0 - sigma)), dgate)
        self.store(dy * gate * sigma, dup)

    def erf(self, x: Array) -> Array:
        """The error function, elementwise.

        Regularised incomplete gamma series below 2.5 and a continued fraction above,
        |error| < 2e-15 in float64. (Abramowitz & Stegun 7.1.6, 7.1.14)
        """
        a = self.xp.abs(x.astype(self.xp.float64))
        near, far = self.xp.minimum(a, 2.5), self.xp.maximum(a, 2.5)
        term = total = near
        for k in range(1, 60):
            term = term * (2.0 * near * near) / (2 * k + 1)
            total = total + term
        series = total * self.xp.exp(-near * near) * (2.0 / math.sqrt(math.pi))
        fraction = far
        for k in range(60, 0, -1):
            fraction = far + (0.5 * k) / fraction
        tail = 1.0 - self.xp.exp(-far * far) / (fraction * math.sqrt(math.pi))
        return (self.xp.sign(x) * self.xp.where(a < 2.5, series, tail)).astype(x.dtype)

    # --- positions --------------------------------------------------------------------

    def rope_table(
        self, positions: Array, width: int, theta: float
    ) -> tuple[Array, Array]:
        """cos and sin of position · theta^(−2i/width).   (s,)  →  two (s, width/2)"""
        xp = self.xp
        frequency = theta ** (-xp.arange(0, width, 2, dtype=xp.float64) / width)
        angle = xp.asarray(positions).astype(xp.float64)[:, None] * frequency
        return xp.cos(angle).astype(self.dtype), xp.sin(angle).astype(self.dtype)

    def rope(self, x: Array, cos: Array, sin: Array, *, inverse: bool = False) -> None:
        """Rotates x in place, half form: (x₁, x₂) → (x₁c − x₂s, x₂c + x₁s).

        Su et al. 2021, with the two halves of a head as the pairs.
        Shapes   x (b, s, n, h), cos and sin (s, h/2)
        """
        half = x.shape[-1] // 2
        c, s = cos[:, None, :], -sin[:, None, :] if inverse else sin[:, None, :]
        first, second = x[..., :half], x[..., half:]
        rotated = first * c - second * s
        second *= c
        second += first * s
        first[...] = rotated

    # --- embedding --------------------------------------------------------------------

    def embedding_fwd(self, ids: Array, table: Array, *, first: int = 0) -> Array:
        """Rows of the table; zero where an id is not in [first, first + rows).

        Shapes   ids (b, s), table (rows, d)  →  (b, s, d)
        """
        local = ids - first
        inside = (local >= 0) & (local < table.shape[0])
        x = self.wide(table[self.xp.where(inside, local, 0)])
        x[~inside] = 0.0
        return x

    def embedding_dw(
        self, dy: Array, ids: Array, dtable: Array, *, first: int = 0
    ) -> None:
        """dtable[id − first] += dy for every id among its rows, in a fixed order."""
        local = (ids - first).reshape(-1)
        inside = (local >= 0) & (local < dtable.shape[0])
        rows = dy.reshape(-1, dy.shape[-1])[inside]
        self._scatter_add(dtable, local[inside], rows)

    def _scatter_add(self, target: Array, index: Array, rows: Array) -> None:
        """target[index] += rows, repeated indices summed in token order."""
        xp = self.xp
        if index.size == 0:
            return
        order = xp.argsort(index, kind="stable")
        ordered = index[order]
        starts = xp.flatnonzero(xp.diff(ordered, prepend=ordered[:1] - 1))
        if xp is np:
            totals = np.add.reduceat(rows[order], starts, axis=0)
        else:
            sums = xp.cumsum(rows[order].astype(xp.float64), axis=0)
            ends = xp.append(starts[1:], ordered.size) - 1
            totals = xp.diff(sums[ends], axis=0, prepend=xp.zeros_like(sums[:1]))
        changed = target[ordered[starts]]
        self.add_to(changed, totals.astype(self.dtype))
        target[ordered[starts]] = changed

    def add_positions(self, x: Array, table: Array, rows: Array) -> None:
        """x += table[rows].   x (b, s, d), table (context, d), rows (s,) distinct"""
        x += self.wide(table[rows])

    def positions_dw(self, dy: Array, rows: Array, dtable: Array) -> None:
        """dtable[rows] += Σ_b dy.   dy (b, s, d), rows (s,) distinct"""
        changed = dtable[rows]
        self.add_to(changed, dy.sum(axis=0))
        dtable[rows] = changed

    # --- loss -------------------------------------------------------------------------

    def row_max(self, logits: Array) -> Array:
        """Largest logit of each token.   (T, v)  →  (T,)"""
        return logits.max(axis=-1)

    def xent_fwd(
        self, logits: Array, local: Array, join: Callable[[Array], Array]
    ) -> tuple[Array, Array, Array]:
        """Peak, sum of exponentials and shifted target logit of each token.

        Makes of logits what `xent_dx` takes: here e = exp(logits − peak).

        join     gives of the largest logits here (T,) those of all ranks' columns; it
                 may write over them
        Shapes   logits (T, v), local (T,) target column or any value outside [0, v)
                 →  peak (T,), Σe (T,), logit[target] − peak (T,), 0 where not held here
        """
        xp, peak = self.xp, join(self.row_max(logits))
        logits -= peak[:, None]
        inside = (local >= 0) & (local < logits.shape[1])
        target = xp.zeros_like(peak)
        rows = xp.flatnonzero(inside)
        target[rows] = logits[rows, local[rows]]
        xp.exp(logits, out=logits)
        return peak, logits.sum(axis=-1), target

    def xent_dx(
        self, e: Array, peak: Array, total: Array, local: Array, seed: Array
    ) -> Array:
        """dlogits = seed·(e/total − onehot), an operand; overwrites e.

        Shapes   e (T, v) as `xent_fwd` left it; peak, total, local, seed (T,)
        """
        e *= (seed / total)[:, None]
        rows = self.xp.flatnonzero((local >= 0) & (local < e.shape[1]))
        e[rows, local[rows]] -= seed[rows]
        return self.operand(e)

    def loss_sum(self, total: Array, target: Array, labels: Array) -> Any:
        """Σ log(total) − target over tokens with a label, in float64.   (T,) each

        A number; on a device an array of no dims, so that the host need not wait.
        """
        losses = (self.xp.log(total) - target)[labels >= 0]
        return float(losses.sum(dtype=self.xp.float64))

    # --- optimizer --------------------------------------------------------------------

    def sum_rows(self, rows: Array, out: Array) -> None:
        """out = Σ rows in order, rounded once.   rows (n, items) of either type, out
        (items,) of that type or the compute type"""
        total = self.wide(rows[0])
        for row in rows[1:]:
            total = total + self.wide(row)
        self.store(total, out)

    def square_sum(self, x: Array) -> float:
        """Σ x² in float64."""
        total = 0.0
        for lo in range(0, x.size, 1 << 16):
            block = self.wide(x[lo : lo + (1 << 16)]).astype(self.xp.float64)
            total += float(self.xp.dot(block, block))
        return total

    def square_sums(self, arrays: Sequence[Array]) -> float:
        """Σ x² over flat arrays, in float64; the host waits for it once."""
        return sum((self.square_sum(x) for x in arrays), 0.0)

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
        """One AdamW update in place (Loshchilov & Hutter 2019, algorithm 2).

        weight, grad, m, v  flat arrays of equal size; weight, m and v are overwritten
        step                1 for the first update;  scale  of the gradient (clipping)
        rounded             16-bit array that the new weights are written to as well
        """
        g = self.wide(grad) * scale
        m *= beta1
        m += (1.0 - beta1) * g
        v *= beta2
        v += (1.0 - beta2) * g * g
        denominator = self.xp.sqrt(v / (1.0 - beta2**step)) + eps
        weight *= 1.0 - lr * decay
        weight -= (lr / (1.0 - beta1**step)) * m / denominator
        if rounded is not None:
            self.store(weight, rounded)
