"""bf16 matrix products on CPUs, through the C API of oneDNN 3.

NumPy has no bf16: here it is a uint16 array that holds the upper halves of float32.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from ctypes.util import find_library
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

from mpipar.errors import DeviceError, ShapeError

CPUINFO = Path("/proc/cpuinfo")
CPU_FLAGS = {"avx512_bf16", "amx_bf16"}
PACKAGE, FILE, MAJOR = "onednn-cpu-gomp", "libdnnl.so.3", 3
ADVICE = 'pip install "mpipar[bf16]", or use train.precision = "fp32"'

BF16, FP32 = np.dtype(np.uint16), np.dtype(np.float32)
PAGE_BYTES = 4096

# Enums of oneapi/dnnl/dnnl_types.h and dnnl_common_types.h
_CPU, _IN_ORDER, _USER_SCRATCHPAD, _QUERY_NAME, _QUERY_SCRATCHPAD = 1, 1, 1, 8, 136
_A, _B, _OUT, _BIAS, _SCRATCHPAD = 1, 33, 17, 41, 80
_TYPES = {BF16: 2, FP32: 3}


class _Argument(ctypes.Structure):
    _fields_ = [("role", c_int), ("memory", c_void_p)]


def why_not() -> str | None:
    """Why bf16 products cannot run here and what to do, or None where they can."""
    if not CPU_FLAGS & _cpu_flags():
        return (
            "bf16 products need a CPU with AVX512-BF16 or AMX, and this one has "
            'neither; train.precision = "fp32" is faster here'
        )
    try:
        _library()
    except DeviceError as error:
        return str(error)
    return None


def _cpu_flags() -> set[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return {word for x in lines if x.startswith("flags") for word in x.split()}


@cache
def _library() -> ctypes.CDLL:
    """The loaded oneDNN.   Raises DeviceError where there is none that can be used"""
    path = _find_library()
    if path is None:
        raise DeviceError(f"bf16 products need oneDNN, which is not here; {ADVICE}")
    try:
        library = ctypes.CDLL(path)
        library.dnnl_version.restype = POINTER(c_int)
        version = library.dnnl_version()[0]
        library.omp_set_num_threads.argtypes = (c_int,)
    except (OSError, AttributeError) as error:
        # The package comes without libgomp, the OpenMP library of GCC.
        message = f"oneDNN cannot be used: {error}; install libgomp (Debian: libgomp1)"
        raise DeviceError(f"{message} and {ADVICE}") from None
    if version != MAJOR:
        message = f"bf16 products need oneDNN {MAJOR}, but {path} is oneDNN {version}"
        raise DeviceError(f"{message}; {ADVICE}")
    # Products keeps what it compiles: oneDNN's own cache would hold it all once more.
    keep = "dnnl_set_primitive_cache_capacity"
    _check(keep, getattr(library, keep)(0))
    library.dnnl_primitive_desc_query_md.restype = c_void_p
    library.dnnl_memory_desc_get_size.restype = c_size_t
    # Declared for speed: every product calls these. Elsewhere the arguments are ints
    # that C reads as int, or ctypes objects.
    library.dnnl_memory_set_data_handle.argtypes = (c_void_p, c_void_p)
    library.dnnl_primitive_execute.argtypes = (c_void_p, c_void_p, c_int, c_void_p)
    return library


def _find_library() -> str | None:
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    paths = (str(file.locate()) for file in files if file.name == FILE)
    return next(paths, None) or find_library("dnnl")


def _check(name: str, status: int) -> None:
    if status:
        raise DeviceError(f"{name} returned status {status}")


def _call(name: str, *arguments: object) -> None:
    _check(name, getattr(_library(), name)(*arguments))


def _create(
    stack: ExitStack, kind: str, *arguments: object, by: str = "create"
) -> c_void_p:
    """A handle that the stack destroys."""
    handle = c_void_p()
    _call(f"dnnl_{kind}_{by}", byref(handle), *arguments)
    destroy = getattr(_library(), f"dnnl_{kind.removeprefix('matmul_')}_destroy")
    stack.callback(destroy, handle)
    return handle


@cache
def _engine() -> tuple[c_void_p, c_void_p, ExitStack]:
    """The engine and the stream of this process, and what keeps them alive."""
    stack = ExitStack()
    engine = _create(stack, "engine", _CPU, c_size_t(0))
    return engine, _create(stack, "stream", engine, _IN_ORDER), stack


class Products:
    """Matrix products of bf16 or float32 arrays with sums in float32.

    Keeps what oneDNN compiles for `capacity` combinations of shapes, strides and types;
    beyond that the oldest is dropped. One thread at a time may use an object.

    Raises   DeviceError with the words of `why_not` where products cannot run
    """

    def __init__(self, capacity: int = 256) -> None:
        if reason := why_not():
            raise DeviceError(reason)
        self.capacity = capacity
        self._products: dict[tuple, _Product] = {}
        self._scratchpad = np.empty(1 << 20, np.uint8)

    def __len__(self) -> int:
        return len(self._products)

    def set_threads(self, threads: int) -> None:
        """Multiply with that many OpenMP threads when called from this thread."""
        _library().omp_set_num_threads(threads)
        # A compiled product divides its work by the threads that it was made for.
        self._products.clear()

    def multiply(
        self,
        a: np.ndarray,
        b: np.ndarray,
        out: np.ndarray,
        *,
        bias: np.ndarray | None = None,
        accumulate: bool = False,
    ) -> None:
        """out = a b + bias; with `accumulate`, out += a b + bias.

        Shapes   a (..., m, k), b (..., k, n), out (..., m, n), bias (n,), none empty. A
                 batch dim of size 1 in a or b goes with any in the other.
        Types    a and b both uint16 (bf16) or both float32; out float32, or uint16
                 where they are; bias float32
        Strides  one of the last two dims of each array is contiguous; the other dims
                 may lie apart and in any order, as in views of (b, s, n, h)
        Memory   out must not overlap the others
        Raises   ShapeError on anything else, DeviceError where oneDNN fails
        """
        key = (
            *(a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype),
            *(out.shape, out.strides, out.dtype, accumulate),
            *(() if bias is None else (bias.shape, bias.strides, bias.dtype)),
        )
        product = self._products.get(key)
        if product is None:
            product = _Product(a, b, out, bias, accumulate, self._reserve)
            if len(self._products) >= self.capacity:
                del self._products[next(iter(self._products))]
            self._products[key] = product
        if not out.flags.writeable:
            raise ShapeError("out must be writeable")
        product.run((a, b, out) if bias is None else (a, b, out, bias))

    def _reserve(self, size: int) -> np.ndarray:
        """Memory from the start of a page, which all products use in turn."""
        if self._scratchpad.size < size + PAGE_BYTES:
            self._scratchpad = np.empty(size + PAGE_BYTES, np.uint8)
        start = -self._scratchpad.ctypes.data % PAGE_BYTES
        return self._scratchpad[start : start + size]


class _Product:
    """One compiled product and the memory objects that it works on."""

    def __init__(
        self,
        a: np.ndarray,
        b: np.ndarray,
        out: np.ndarray,
        bias: np.ndarray | None,
        accumulate: bool,
        reserve: Callable[[int], np.ndarray],
    ) -> None:
        self._owned = ExitStack()
        _check_operands(a, b, out, bias)
        operands = _by_role(a, b, out, bias)
        library, (engine, self._stream, _) = _library(), _engine()
        with ExitStack() as passing:
            described = {role: _describe(passing, x) for role, x in operands.items()}
            plan = _create(
                passing,
                "matmul_primitive_desc",
                engine,
                *(described.get(role) for role in (_A, _B, _BIAS, _OUT)),
                _attributes(passing, accumulate),
            )
            _refuse_reference(plan, a, b, out)
            self._primitive = _create(self._owned, "primitive", plan)
            space = library.dnnl_primitive_desc_query_md(plan, _QUERY_SCRATCHPAD, 0)
            described[_SCRATCHPAD] = space = c_void_p(space)
            self._scratchpad = reserve(library.dnnl_memory_desc_get_size(space))
            memories = {
                role: _create(self._owned, "memory", x, engine, None)
                for role, x in described.items()
            }
        self._memories = [memories[role] for role in operands]
        self._arguments = (_Argument * len(memories))(*memories.items())
        self._set_data = library.dnnl_memory_set_data_handle
        self._execute = library.dnnl_primitive_execute
        self._wait = library.dnnl_stream_wait
        self._set_data(memories[_SCRATCHPAD], self._scratchpad.ctypes.data)

    def __del__(self) -> None:
        self._owned.close()

    def run(self, arrays: tuple[np.ndarray, ...]) -> None:
        set_data = self._set_data
        for memory, array in zip(self._memories, arrays, strict=True):
            _check("dnnl_memory_set_data_handle", set_data(memory, array.ctypes.data))
        arguments = self._arguments
        status = self._execute(self._primitive, self._stream, len(arguments), arguments)
        _check("dnnl_primitive_execute", status)
        _check("dnnl_stream_wait", self._wait(self._stream))


def _attributes(stack: ExitStack, accumulate: bool) -> c_void_p:
    attributes = _create(stack, "primitive_attr")
    # A scratchpad of the library belongs to the thread that compiles.
    _call("dnnl_primitive_attr_set_scratchpad_mode", attributes, _USER_SCRATCHPAD)
    if accumulate:
        after = _create(stack, "post_ops")
        _call("dnnl_post_ops_append_sum", after, c_float(1.0), 0, 0)
        _call("dnnl_primitive_attr_set_post_ops", attributes, after)
    return attributes


def _refuse_reference(plan: c_void_p, *operands: np.ndarray) -> None:
    """Refuse oneDNN's loops for layouts without a kernel: hundreds of times slower."""
    name = c_char_p()
    _call("dnnl_primitive_desc_query", plan, _QUERY_NAME, 0, byref(name))
    if name.value.startswith(b"ref"):
        layouts = ", ".join(f"{x.shape} by {x.strides} bytes" for x in operands)
        raise ShapeError(f"no fast product for the strides of a, b, out: {layouts}")


def _check_operands(
    a: np.ndarray, b: np.ndarray, out: np.ndarray, bias: np.ndarray | None
) -> None:
    if a.dtype != b.dtype or a.dtype not in _TYPES or out.dtype not in (FP32, a.dtype):
        raise ShapeError(
            "a and b must be both uint16 or both float32, and out float32 or of their "
            f"type, not {a.dtype}, {b.dtype} and {out.dtype}"
        )
    fits = a.ndim == b.ndim == out.ndim >= 2 and a.shape[-1] == b.shape[-2]
    fits = fits and out.shape[-2:] == (a.shape[-2], b.shape[-1])
    batches = zip(a.shape[:-2], b.shape[:-2], out.shape[:-2], strict=False)
    fits = fits and all(z == max(x, y) and min(x, y) in (1, z) for x, y, z in batches)
    if not fits or 0 in (*a.shape, *b.shape):
        raise ShapeError(f"no product {a.shape} × {b.shape} into {out.shape}")
    if bias is not None and (
        bias.dtype != FP32
        or bias.shape != out.shape[-1:]
        or not bias.flags.c_contiguous
    ):
        raise ShapeError(f"bias must be float32 of shape {out.shape[-1:]}, contiguous")


def _by_role(
    a: np.ndarray, b: np.ndarray, out: np.ndarray, bias: np.ndarray | None
) -> dict[int, np.ndarray]:
    """The arguments in their order, each under the role it has for oneDNN."""
    by_columns = out.shape[-1] > 1 and out.strides[-1] != out.itemsize
    if bias is not None:
        if by_columns:
            raise ShapeError("out of a product with bias must have contiguous rows")
        row = bias.reshape(*(1,) * (out.ndim - 1), bias.size)
        return {_A: a, _B: b, _OUT: out, _BIAS: row}
    if by_columns:
        # oneDNN writes rows: outᵀ = bᵀ aᵀ
        a, b, out = (x.swapaxes(-1, -2) for x in (a, b, out))
        return {_B: a, _A: b, _OUT: out}
    return {_A: a, _B: b, _OUT: out}


def _describe(stack: ExitStack, x: np.ndarray) -> c_void_p:
    numbers = c_int64 * x.ndim
    arguments = (x.ndim, numbers(*x.shape), _TYPES[x.dtype], numbers(*_strides(x)))
    return _create(stack, "memory_desc", *arguments, by="create_with_strides")


def _strides(x: np.ndarray) -> list[int]:
    """Strides in items.

    A dim of size 1 gets the stride that it has in a contiguous array: NumPy leaves any
    number there, for which oneDNN has no kernel.
    """
    whole = all(stride % x.itemsize == 0 for stride in x.strides)
    strides = [stride // x.itemsize for stride in x.strides]
    rows, columns = x.shape[-2:]
    if columns == 1:
        strides[-1] = 1
    if rows == 1:
        strides[-2] = columns if strides[-1] == 1 else 1
    extent = max(size * stride for size, stride in zip(x.shape, strides, strict=True))
    for i, size in enumerate(x.shape[:-2]):
        strides[i] = extent if size == 1 else strides[i]
    down, right = strides[-2:]
    lines = (right == 1 and down >= columns) or (down == 1 and right >= rows)
    if not (whole and lines and min(strides) > 0):
        raise ShapeError(
            "one of the last two dims must be contiguous, and no dim repeated or "
            f"reversed, unlike {x.shape} by {x.strides} bytes"
        )
    return strides
