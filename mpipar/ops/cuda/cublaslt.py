"""Matrix products by cuBLASLt of CUDA 12 and 13, through its C API.

A product is D = op(A) op(B) + C of row-major matrices. The library's matrices are
column-major, so it is asked for Dᵀ = op(B)ᵀ op(A)ᵀ + Cᵀ, which is the same memory: its
A is our B, its m are our columns.
"""

import ctypes
import glob
import os
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np

from mpipar.errors import DeviceError

# Names the library to load; by itself that of the CUDA that CuPy finds
VARIABLE = "MPIPAR_CUBLASLT"
MAJORS = (12, 13)
# Algorithms that a plan has to choose from, at most
ALGORITHMS = 8

# Numbers of cublasLt.h, cublas_api.h and library_types.h
TYPES = {"float32": 0, "float64": 1, "float16": 2, "uint16": 14}
_COMPUTE_32F, _COMPUTE_64F = 68, 70
_NOT_SUPPORTED, _INVALID_VALUE = 15, 7
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER, _AUX_POINTER, _AUX_LD, _BIAS_TYPE = (
    3, 4, 7, 8, 11, 12, 26
)  # fmt: skip
_MAX_WORKSPACE, _REDUCTION_SCHEMES = 1, 3
_ALIGNMENTS_AB, _ALIGNMENTS_CD = (5, 6), (7, 8)
# Partial sums are added in the compute type, not in the type of D.
_REDUCTION_COMPUTE_TYPE = 2

_FUNCTIONS = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (
        POINTER(c_void_p), c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (
        *(c_void_p,) * 7, c_int, c_void_p, POINTER(c_int)),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}  # fmt: skip


class Epilogue(IntEnum):
    """What is done to op(A) op(B) + C before it is stored.

    BIAS           adds a vector along the columns
    GELU_AUX       stores that, and GELU of it by tanh as D
    GELU_AUX_BIAS  both, first the bias
    DGELU          multiplies by the slope of GELU at what was stored
    """

    NONE = 1
    BIAS = 4
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192

    @property
    def has_bias(self) -> bool:
        """True where a vector is read."""
        return self in (Epilogue.BIAS, Epilogue.GELU_AUX_BIAS)

    @property
    def has_aux(self) -> bool:
        """True where a second matrix of the size of D is written or read."""
        return self not in (Epilogue.NONE, Epilogue.BIAS)


class Product(NamedTuple):
    """All that a plan depends on.

    rows, columns, depth   of D, and what is summed over
    factors, result        names of the types of A and B, and of C, D, bias and aux
    turned_a, turned_b     True where op is the transpose
    step_a, ... step_d     items from one row to the next; those of aux are the columns
    adds                   True where C is added, which may be D itself
    align_ab, align_cd     bytes that addresses are multiples of, up to 16: those of A
                           and B, and those of C, D and aux
    """

    rows: int
    columns: int
    depth: int
    factors: str
    result: str
    turned_a: bool
    turned_b: bool
    step_a: int
    step_b: int
    step_c: int
    step_d: int
    adds: bool
    epilogue: Epilogue
    align_ab: int
    align_cd: int


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    ]


class Library:
    """A loaded cuBLASLt and its handle for the current device.

    major    of CUDA, 0 = either
    Raises   DeviceError where there is no library, or it finds no device
    """

    def __init__(self, major: int = 0) -> None:
        self.functions = load(major)
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function.   Raises DeviceError with the name of its status"""
        self.check(name, getattr(self.functions, name)(*arguments))

    def check(self, name: str, status: int) -> None:
        """Raises DeviceError unless the status is that of success."""
        if status:
            raise DeviceError(f"{name} returned {self.name(status)}")

    def name(self, status: int) -> str:
        """What cublas_api.h calls a status."""
        return self.functions.cublasLtGetStatusName(status).decode()

    def create(self, kind: str, *arguments: object) -> c_void_p:
        """A new descriptor."""
        made = c_void_p()
        self.call(f"cublasLt{kind}Create", byref(made), *arguments)
        return made

    def set(self, kind: str, what: c_void_p, attribute: int, value: object) -> None:
        """Sets an attribute of a descriptor to a ctypes value."""
        size = ctypes.sizeof(value)
        self.call(f"cublasLt{kind}SetAttribute", what, attribute, byref(value), size)


class Plan:
    """A product made ready to run; its algorithms, the likely fastest first.

    workspace   bytes that an algorithm may use
    bias, aux   addresses, only their alignment matters

    `chosen` is the algorithm that runs. Without algorithms a plan cannot run: the
    library has none for this product, and `status` says why.
    """

    def __init__(
        self, library: Library, product: Product, workspace: int, bias: int, aux: int
    ) -> None:
        self.library, self.product, self.workspace = library, product, workspace
        self.chosen = 0
        number = ctypes.c_double if product.result == "float64" else ctypes.c_float
        self._one, self._beta = number(1.0), number(float(product.adds))
        self._handles: list[tuple[str, c_void_p]] = []
        self._descriptor = self._describe()
        self._pointed: tuple[int, int] | None = None
        self._point(bias, aux)
        self._layouts = self._lay_out()
        self.algorithms = self._ask()
        self._matmul = library.functions.cublasLtMatmul

    def run(
        self, a: int, b: int, c: int, d: int, bias: int, aux: int, workspace: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Starts the product on a stream; all are addresses.

        Raises   DeviceError where the library refuses it
        """
        if (bias, aux) != self._pointed:
            self._point(bias, aux)
        layout_a, layout_b, layout_c, layout_d = self._layouts
        status = self._matmul(
            self.library.handle, self._descriptor, ctypes.addressof(self._one),
            b, layout_b, a, layout_a, ctypes.addressof(self._beta),
            c, layout_c, d, layout_d, ctypes.addressof(self.algorithms[self.chosen]),
            workspace, self.workspace, stream,
        )  # fmt: skip
        self.library.check("cublasLtMatmul", status)

    def close(self) -> None:
        """Frees the descriptors."""
        while self._handles:
            kind, handle = self._handles.pop()
            self.library.call(f"cublasLt{kind}Destroy", handle)

    def _make(self, kind: str, *arguments: object) -> c_void_p:
        made = self.library.create(kind, *arguments)
        self._handles.append((kind, made))
        return made

    def _describe(self) -> c_void_p:
        product = self.product
        is_double = product.result == "float64"
        descriptor = self._make(
            "MatmulDesc", _COMPUTE_64F if is_double else _COMPUTE_32F,
            TYPES["float64" if is_double else "float32"],
        )  # fmt: skip
        values = [
            (_TRANSA, ctypes.c_int32(product.turned_b)),
            (_TRANSB, ctypes.c_int32(product.turned_a)),
            (_EPILOGUE, ctypes.c_uint32(product.epilogue)),
        ]
        if product.epilogue.has_bias:
            values.append((_BIAS_TYPE, ctypes.c_int32(TYPES[product.result])))
        if product.epilogue.has_aux:
            values.append((_AUX_LD, ctypes.c_int64(product.columns)))
        for attribute, value in values:
            self.library.set("MatmulDesc", descriptor, attribute, value)
        return descriptor

    def _point(self, bias: int, aux: int) -> None:
        """Tells the descriptor where bias and aux lie."""
        epilogue, self._pointed = self.product.epilogue, (bias, aux)
        for is_there, attribute, address in (
            (epilogue.has_bias, _BIAS_POINTER, bias),
            (epilogue.has_aux, _AUX_POINTER, aux),
        ):
            if is_there:
                value = c_void_p(address)
                self.library.set("MatmulDesc", self._descriptor, attribute, value)

    def _lay_out(self) -> list[c_void_p]:
        """Layouts of our A, B, C and D; a row of ours is a column of the library's."""
        p = self.product
        shape_a = (p.depth, p.rows) if p.turned_a else (p.rows, p.depth)
        shape_b = (p.columns, p.depth) if p.turned_b else (p.depth, p.columns)
        shape_d, own, result = (p.rows, p.columns), TYPES[p.factors], TYPES[p.result]
        return [
            self._make("MatrixLayout", kind, width, height, step)
            for kind, (height, width), step in (
                (own, shape_a, p.step_a),
                (own, shape_b, p.step_b),
                (result, shape_d, p.step_c),
                (result, shape_d, p.step_d),
            )
        ]

    def _ask(self) -> list[_Algorithm]:
        library, product = self.library, self.product
        preference = library.create("MatmulPreference")
        values = [(_MAX_WORKSPACE, ctypes.c_uint64(self.workspace))]
        for attribute in _ALIGNMENTS_AB:
            values.append((attribute, ctypes.c_uint32(product.align_ab)))
        for attribute in _ALIGNMENTS_CD:
            values.append((attribute, ctypes.c_uint32(product.align_cd)))
        if np.dtype(product.result).itemsize == 2:
            mask = ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE)
            values.append((_REDUCTION_SCHEMES, mask))
        for attribute, value in values:
            library.set("MatmulPreference", preference, attribute, value)
        found, count = (_Algorithm * ALGORITHMS)(), c_int()
        a, b, c, d = self._layouts
        name = "cublasLtMatmulAlgoGetHeuristic"
        status = getattr(library.functions, name)(
            library.handle, self._descriptor, b, a, c, d, preference, ALGORITHMS,
            found, byref(count),
        )  # fmt: skip
        library.call("cublasLtMatmulPreferenceDestroy", preference)
        self.status = library.name(status)
        if status in (_NOT_SUPPORTED, _INVALID_VALUE):
            return []
        library.check(name, status)
        return [x for x in found[: count.value] if x.state == 0]


@cache
def load(major: int = 0) -> ctypes.CDLL:
    """The library, its functions declared; that of one CUDA rather than of others.

    Raises   DeviceError where there is none
    """
    majors = sorted(MAJORS, key=lambda other: other != major)
    tried = []
    for path in _candidates(majors):
        try:
            library = ctypes.CDLL(path)
            library.cublasLtGetVersion.restype = c_size_t
            version = library.cublasLtGetVersion()
        except (OSError, AttributeError) as error:
            tried.append(str(error))
            continue
        if version // 10000 not in MAJORS:
            tried.append(f"{path} is of version {version}")
            continue
        for name, arguments in _FUNCTIONS.items():
            getattr(library, name).argtypes = arguments
        library.cublasLtGetStatusName.restype = c_char_p
        return library
    advice = " or ".join(f'pip install "cupy-cuda{m}x[ctk]"' for m in majors)
    raise DeviceError(
        f"matrix products on a GPU need cuBLASLt: {advice}, or name its file by "
        f"{VARIABLE}; tried:" + "".join(f"\n  - {line}" for line in tried)
    )


def _candidates(majors: list[int]) -> Iterator[str]:
    """Paths and names of the library, those that CuPy would take first."""
    if given := os.environ.get(VARIABLE):
        yield given
        return
    found = _found_by_pathfinder()
    for name in (f"libcublasLt.so.{major}" for major in majors):
        if name in found:
            yield found
        for folder in sys.path:
            yield from sorted(glob.glob(f"{folder}/nvidia/*/lib/{name}"))
        for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME")):
            if root:
                yield from (f"{root}/{lib}/{name}" for lib in ("lib64", "lib"))
        yield name
        yield f"/usr/local/cuda/lib64/{name}"


def _found_by_pathfinder() -> str:
    """The file that cuda-pathfinder, which CuPy comes with, loads; "" for none."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return load_nvidia_dynamic_lib("cublasLt").abs_path or ""
    except (ImportError, RuntimeError):
        return ""
