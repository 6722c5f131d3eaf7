"""The matrix product of the BLAS that NumPy carries, with what NumPy leaves out: adding
to what is there (beta = 1), and an address for compiled kernels.
"""

import ctypes
import functools

import numpy as np

# ILP64 names first; with LP64, Linux's calling conventions read the same registers.
_NAMES = {
    "float32": ("scipy_cblas_sgemm64_", "cblas_sgemm64_", "cblas_sgemm"),
    "float64": ("scipy_cblas_dgemm64_", "cblas_dgemm64_", "cblas_dgemm"),
}
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112


@functools.cache
def gemm_address(dtype: str) -> int:
    """Where cblas gemm of "float32" or "float64" lies; 0 where NumPy has none."""
    library = ctypes.CDLL(np._core._multiarray_umath.__file__)
    for name in _NAMES[dtype]:
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    return 0


@functools.cache
def _gemm(dtype: str) -> ctypes._CFuncPtr | None:
    address = gemm_address(dtype)
    if not address:
        return None
    real = ctypes.c_float if dtype == "float32" else ctypes.c_double
    flag, size, place = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(
        None, flag, flag, flag, size, size, size, real, place, size, place, size, real,
        place, size,
    )  # fmt: skip
    return kind(address)


def multiply(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    onto: np.ndarray | None = None,
) -> None:
    """out = a b + bias + onto, those that there are.

    Matrices (m, k), (k, n), (m, n) may be transposed views, out has contiguous rows;
    bias (n,); onto (m, n) may be out.
    """
    if bias is None and onto is None:
        np.matmul(a, b, out=out)
    else:
        fill(out, bias, onto)
        add_product(a, b, out)


def fill(out: np.ndarray, bias: np.ndarray | None, onto: np.ndarray | None) -> None:
    """out = bias + onto, those that there are; onto may be out."""
    if onto is None:
        out[...] = bias
    elif bias is not None:
        np.add(onto, bias, out=out)
    elif onto is not out:
        out[...] = onto


def add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out += a b; matrices may be transposed views, out has contiguous rows."""
    function = _gemm(out.dtype.name)
    layouts = [_layout(x) for x in (a, b)]
    if function is None or None in layouts or _layout(out) != (_PLAIN, out.shape[1]):
        out += a @ b
        return
    (ta, lda), (tb, ldb) = layouts
    m, n = out.shape
    function(
        _ROW_MAJOR, ta, tb, m, n, a.shape[1], 1.0, a.ctypes.data, lda, b.ctypes.data,
        ldb, 1.0, out.ctypes.data, n,
    )  # fmt: skip


def _layout(x: np.ndarray) -> tuple[int, int] | None:
    """Transposed or not, and the row length that BLAS is told; None where it cannot."""
    rows, cols = (stride // x.itemsize for stride in x.strides)
    if cols == 1 and rows >= max(1, x.shape[1]):
        return _PLAIN, rows
    if rows == 1 and cols >= max(1, x.shape[0]):
        return _TRANSPOSED, cols
    return None
