"""Matrix products of CUDA ops by cuBLASLt, with all that it can do in the same pass."""

import math
import os
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from mpipar.errors import DeviceError
from mpipar.ops.cuda.arrays import COLUMNS, LONG, CudaArrayOps, spaced
from mpipar.ops.cuda.cublaslt import Epilogue, Library, Plan, Product
from mpipar.ops.cuda.device import CupyDevice, HostDevice
from mpipar.ops.half import is_half

Array = Any

# Addresses that are multiples of so many bytes suit every algorithm.
ALIGNMENT = 16
# Rows of the inputs that GELU keeps are of whole multiples of so many items.
GELU_COLUMNS = 8
# Types of factors and of results that go together
PAIRS = {
    ("float64", "float64"),
    ("float32", "float32"),
    *((half, result) for half in ("uint16", "float16") for result in (half, "float32")),
}
# Plans that are kept; beyond that the oldest goes.
CAPACITY = 2048
# Products of so many tokens, and of whole multiples of TOKENS, come again and again:
# worth timing their algorithms. Others may be of any size, as those of experts.
TUNED_TOKENS, TOKENS = 1024, 64
# The first algorithm is taken that needs the time of the fastest or a little more.
NEARLY = 1.03
# "0" in the environment takes the algorithms as they come.
TUNE = "MPIPAR_TUNE"


class Products:
    """Plans of products, made at the first use of a shape.

    tune   time the algorithms of large 16-bit products at their first use; without,
           the first one is taken, which is the same in every run
    made, calls   how many plans were made, and products started
    """

    def __init__(self, device: HostDevice, *, tune: bool) -> None:
        self.device, self.tune = device, tune
        self.made = self.calls = 0
        self.plans: dict[Product, Plan] = {}
        self._library: Library | None = None

    def multiply(self, product: Product, addresses: tuple[int, ...]) -> bool:
        """Starts a product on the current stream; False where cuBLASLt has none such.

        addresses   of a, b, c, d, bias and aux, 0 where there is none
        Raises      DeviceError where even a plain product cannot be had
        """
        plan = self.plans.get(product)
        if plan is None:
            plan = self._make(product, addresses)
        if not plan.algorithms:
            return False
        stream = self.device.stream()
        at, _ = self.device.workspace(stream)
        plan.run(*addresses, at, stream)
        self.calls += 1
        return True

    def _make(self, product: Product, addresses: tuple[int, ...]) -> Plan:
        if self._library is None:
            self._library = Library(self.device.major)
        _, size = self.device.workspace(self.device.stream())
        plan = Plan(self._library, product, size, *addresses[4:])
        if not plan.algorithms and product.epilogue is Epilogue.NONE:
            raise DeviceError(f"cuBLASLt has nothing for {product}: {plan.status}")
        if self.tune and _is_steady(product) and not self.device.is_capturing():
            plan.chosen = self._fastest(plan, addresses)
        if len(self.plans) >= CAPACITY:
            self.plans.pop(next(iter(self.plans))).close()
        self.plans[product] = plan
        self.made += 1
        return plan

    def _fastest(self, plan: Plan, addresses: tuple[int, ...]) -> int:
        """The number of the algorithm to take, by the time that each needs."""
        product, (a, b, c, d, *rest) = plan.product, addresses
        kept, times = None, []
        if c == d and product.adds:
            # Not over what is added to
            size = product.rows * product.step_d * np.dtype(product.result).itemsize
            try:
                c, kept = self.device.allocate(size)
            except (DeviceError, MemoryError):
                return 0  # No memory to try it in
            d = c
        stream = self.device.stream()
        at, _ = self.device.workspace(stream)
        run = partial(plan.run, a, b, c, d, *rest, at, stream)
        for number in range(len(plan.algorithms)):
            plan.chosen = number
            try:
                times.append(self.device.milliseconds(run))
            except DeviceError:
                times.append(math.inf)
        del kept
        best = min(times, default=0.0)
        return next((i for i, time in enumerate(times) if time <= NEARLY * best), 0)


class CudaProductOps(CudaArrayOps):
    """The dense products. A bias, and what is added to, cost no pass of their own. Nor
    does GELU by tanh of 16-bit numbers, on devices where that is the faster way: what
    is kept of it is its input then, and its slope elsewhere.
    """

    def __init__(self, xp: ModuleType, *arguments: Any) -> None:
        super().__init__(xp, *arguments)
        device = HostDevice() if self.on_host else CupyDevice()
        tune = not self.on_host and os.environ.get(TUNE) != "0"
        self.products = Products(device, tune=tune)

    def linear_fwd(
        self,
        x: Array,
        w: Array,
        b: Array | None = None,
        onto: Array | None = None,
        *,
        narrow: bool = False,
    ) -> Array:
        x, w = self._factors(x, w)
        shape = *x.shape[:-1], w.shape[0]
        if narrow and self.is_mixed:
            y = self._spaced_operand(shape)
            if onto is None and self._forward(x, w, y, b):
                return y
            return self.operand(self.linear_fwd(x, w, b, onto))
        y = self.empty(shape)
        if self._forward(x, w, y, b, onto):
            return y
        self._forward(x, w, y)
        return self.add_residual(y, b, onto)

    def _forward(
        self,
        x: Array,
        w: Array,
        y: Array,
        b: Array | None = None,
        onto: Array | None = None,
    ) -> bool:
        """y = x Wᵀ + b + onto; False where cuBLASLt does not do all of it at once."""
        return all(
            self._multiply(
                x,
                _rows(w, part),
                _columns(y, part),
                turned_b=True,
                bias=_rows(b, part),
                onto=_columns(onto, part),
            )
            for part in _parts(len(w), x.dtype)
        )

    def linear_dx(self, dy: Array, w: Array, *, narrow: bool = False) -> Array:
        dy, w = self._factors(dy, w)
        make = self.empty_operand if narrow else self.empty
        dx, onto = make((*dy.shape[:-1], w.shape[1])), None
        for part in _parts(len(w), w.dtype):
            factors = _columns(dy, part), _rows(w, part)
            if not self._multiply(*factors, dx, onto=onto):
                return self.operand(self.linear_dx(dy, w))
            onto = dx
        return dx

    def linear_dw(self, dy: Array, x: Array, dw: Array) -> None:
        dy, x = self._factors(dy, x)
        if not _has(x.dtype, dw.dtype, Epilogue.NONE):
            sums = self.xp.zeros(dw.shape, self.dtype)
            self.linear_dw(dy, x, sums)
            self.add_to(dw, sums)
            return
        for part in _parts(len(dw), x.dtype):
            own = _rows(dw, part)
            self._multiply(_columns(dy, part), x, own, turned_a=True, onto=own)

    def linear_gelu_fwd(
        self, x: Array, w: Array, b: Array | None, *, tanh: bool
    ) -> tuple[Array, Array]:
        if not self._keeps_inputs(w.shape[0], tanh):
            return super().linear_gelu_fwd(x, w, b, tanh=tanh)
        x, w = self._factors(x, w)
        y, u = (self.empty_operand((*x.shape[:-1], w.shape[0])) for _ in "yu")
        if self._multiply(x, w, y, turned_b=True, bias=b, aux=u):
            return y, u
        u = self.linear_fwd(x, w, b, narrow=True)
        return self.gelu_fwd(u, tanh=tanh)[0], u

    def linear_gelu_dx(self, dy: Array, w: Array, kept: Array, *, tanh: bool) -> Array:
        if not self._keeps_inputs(w.shape[1], tanh):
            return super().linear_gelu_dx(dy, w, kept, tanh=tanh)
        dy, w = self._factors(dy, w)
        du = self.empty_operand(kept.shape)
        if self._multiply(dy, w, du, aux=kept):
            return du
        _, slope = self.gelu_fwd(kept, tanh=tanh)
        return self.gelu_dx(self.linear_dx(dy, w, narrow=True), slope)

    def _keeps_inputs(self, width: int, tanh: bool) -> bool:
        """True where GELU is a part of products."""
        wanted = tanh and self.is_mixed and width % GELU_COLUMNS == 0
        return wanted and self.products.device.has_fast_gelu

    def _factors(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Both of one type.   Raises TypeError where an array is of a third type"""
        for x in (a, b):
            if x.dtype not in (self.operand_dtype, self.dtype):
                raise TypeError(f"a factor of {x.dtype} in {self.precision}")
        return (a, b) if a.dtype == b.dtype else (self.wide(a), self.wide(b))

    def _multiply(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        turned_a: bool = False,
        turned_b: bool = False,
        bias: Array | None = None,
        onto: Array | None = None,
        aux: Array | None = None,
    ) -> bool:
        """out = op(a) op(b) + bias + onto, which may be out; with aux a part of GELU.

        False, and nothing done, where cuBLASLt does not do all of that at once.
        """
        if out.size == 0:
            return True
        epilogue = _epilogue(turned_b, bias, aux)
        if not _has(a.dtype, out.dtype, epilogue):
            return False
        if onto is not None and onto.dtype != out.dtype:
            return False
        rows, columns = math.prod(out.shape[:-1]), out.shape[-1]
        depth = math.prod(a.shape[:-1]) if turned_a else a.shape[-1]
        if depth == 0:
            return _fill(out, onto, epilogue)
        (a, step_a), (b, step_b) = _matrix(a), _matrix(b)
        step_d = columns if out.flags.c_contiguous else int(spaced(out)[1])
        c, step_c = (out, step_d) if onto is None else _matrix(onto)
        at = self.products.device.address
        at_a, at_b, at_c, at_d = at(a), at(b), at(c), at(out)
        at_bias, at_aux = 0, 0 if aux is None else at(aux)
        if bias is not None:
            bias = self._vector(bias, out.dtype)
            at_bias = at(bias)
        factors, results = at_a | at_b | ALIGNMENT, at_c | at_d | at_aux | ALIGNMENT
        product = Product(
            rows, columns, depth, a.dtype.name, out.dtype.name, turned_a, turned_b,
            step_a, step_b, step_c, step_d, onto is not None, epilogue,
            factors & -factors, results & -results,
        )  # fmt: skip
        return self.products.multiply(
            product, (at_a, at_b, at_c, at_d, at_bias, at_aux)
        )

    def _vector(self, bias: Array, dtype: np.dtype) -> Array:
        """A bias of the type of the result, where every algorithm can read it."""
        bias = self.wide(bias) if dtype == self.dtype else self.operand(bias)
        bias = self._solid(bias)
        if self.products.device.address(bias) % ALIGNMENT:
            bias = bias.copy()
        return bias


def _fill(out: Array, onto: Array | None, epilogue: Epilogue) -> bool:
    """A product whose items are sums of nothing, as `_multiply`."""
    if epilogue is not Epilogue.NONE:
        return False
    if onto is None:
        out.fill(0)
    elif onto is not out:
        out[...] = onto
    return True


def _is_steady(product: Product) -> bool:
    """True for products that are worth timing. Those of 32 bits are not, for they may
    decide what ranks must decide alike."""
    tokens = product.depth if product.turned_a else product.rows
    is_large = tokens >= TUNED_TOKENS and tokens % TOKENS == 0
    return is_large and is_half(np.dtype(product.factors))


def _parts(rows: int, dtype: np.dtype) -> list[slice | None]:
    """The rows of a weight by which a product is split, see COLUMNS; None = all."""
    rest = rows % COLUMNS if is_half(dtype) and rows >= LONG else 0
    return [slice(0, rows - rest), slice(rows - rest, rows)] if rest else [None]


def _rows(x: Array | None, part: slice | None) -> Array | None:
    return x if x is None or part is None else x[part]


def _columns(x: Array | None, part: slice | None) -> Array | None:
    return x if x is None or part is None else x[..., part]


def _epilogue(forward: bool, bias: Array | None, aux: Array | None) -> Epilogue:
    if aux is None:
        return Epilogue.NONE if bias is None else Epilogue.BIAS
    if not forward:
        return Epilogue.DGELU
    return Epilogue.GELU_AUX if bias is None else Epilogue.GELU_AUX_BIAS


def _has(factors: np.dtype, result: np.dtype, epilogue: Epilogue) -> bool:
    """True where cuBLASLt has products of such types."""
    pair = factors.name, result.name
    return pair in PAIRS and (epilogue is Epilogue.NONE or result.name != "float64")


def _matrix(x: Array) -> tuple[Array, int]:
    """An array of rows evenly spaced, and how many items lie from one to the next."""
    if x.flags.c_contiguous:
        return x, x.shape[-1]
    try:
        step = int(spaced(x)[1])
    except ValueError:
        step = 0
    if step >= x.shape[-1]:
        return x, step
    # Uneven, overlapping or backwards
    return x.copy(order="C"), x.shape[-1]
