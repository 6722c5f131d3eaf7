"""The product of our own: every edge, every layout, nothing read that is not there."""

import numpy as np
import pytest
from numeric import assert_close

from mpipar.ops import blas
from mpipar.ops.kernels import product
from mpipar.ops.kernels.tile import has_registers
from mpipar.ops.numpy_ops import NumpyOps

pytestmark = pytest.mark.skipif(not has_registers(), reason="no AVX-512")
ERROR = {"float32": 3e-4, "float64": 1e-12}


@pytest.fixture(scope="module", params=sorted(ERROR))
def ops(request):
    return NumpyOps(request.param)


def draw(ops, *shape, turned=False):
    rng = np.random.default_rng(sum(shape))
    shape = shape[::-1] if turned else shape
    x = rng.standard_normal(shape).astype(ops.dtype)
    return x.T if turned else x


def multiply(ops, a, b, out, bias=None, onto=None):
    """The kernel itself: the op leaves small products to BLAS."""
    scratch = np.full(product.SCRATCH // out.itemsize, np.nan, out.dtype)
    product.multiply(
        a, b, out[0] if bias is None else bias, bias is not None,
        out if onto is None else onto, onto is not None, out, scratch,
    )  # fmt: skip


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize(
    "m, n, k",
    [
        (1, 1, 1),
        (12, 32, 16),
        (11, 31, 5),
        (29, 33, 13),
        (24, 65, 257),
        (25, 400, 513),
        (13, 1601, 20),
        (40, 100, 1030),
    ],
)
def test_product_equals_numpy(ops, m, n, k, turned):
    a, b = draw(ops, m, k, turned="a" in turned), draw(ops, k, n, turned="b" in turned)
    bias, onto = draw(ops, n), draw(ops, m, n)
    out = np.full((m, n), np.nan, ops.dtype)
    multiply(ops, a, b, out)
    assert_close(out, a @ b, ERROR[ops.dtype.name])
    multiply(ops, a, b, out, bias, onto)
    assert_close(out, a @ b + bias + onto, ERROR[ops.dtype.name])
    total = onto.copy()
    multiply(ops, a, b, total, onto=total)
    assert_close(total, a @ b + onto, ERROR[ops.dtype.name])


@pytest.mark.parametrize("turned", [False, True])
def test_rows_beside_the_product_are_left_alone(ops, turned):
    a, b = draw(ops, 30, 40, turned=turned), draw(ops, 40, 45)
    whole = np.full((34, 61), 7, ops.dtype)
    multiply(ops, a, b, whole[2:32, 9:54])
    assert_close(whole[2:32, 9:54], a @ b, ERROR[ops.dtype.name])
    whole[2:32, 9:54] = 7
    assert (whole == 7).all()


@pytest.mark.parametrize("turned", [False, True])
def test_a_row_does_not_depend_on_the_rows_around_it(ops, turned):
    a, b = draw(ops, 50, 600, turned=turned), draw(ops, 600, 70)
    whole, alone = np.empty((50, 70), ops.dtype), np.empty((50, 70), ops.dtype)
    multiply(ops, a, b, whole)
    for lo, hi in ((0, 1), (1, 14), (14, 37), (37, 50)):
        multiply(ops, a[lo:hi], b, alone[lo:hi])
    assert np.array_equal(whole, alone)


def test_nan_and_infinity_stay_in_their_rows_and_columns(ops):
    a, b = draw(ops, 30, 40), draw(ops, 40, 50)
    a[3, 7], b[9, 49] = np.nan, np.inf
    out = np.empty((30, 50), ops.dtype)
    multiply(ops, a, b, out)
    bad = ~np.isfinite(out)
    assert bad[3].all() and bad[:, 49].all() and bad.sum() == 30 + 50 - 1


def test_products_of_nothing(ops):
    bias, onto = draw(ops, 5), draw(ops, 20, 5)
    y = ops.linear_fwd(np.empty((20, 0), ops.dtype), np.empty((5, 0), ops.dtype))
    assert np.array_equal(y, np.zeros((20, 5)))
    empty = np.empty((20, 0), ops.dtype), np.empty((5, 0), ops.dtype)
    assert_close(ops.linear_fwd(*empty, bias, onto), bias + onto, 1e-6)
    none = np.empty((0, 7), ops.dtype)
    assert ops.linear_fwd(none, draw(ops, 5, 7)).shape == (0, 5)
    assert ops.linear_fwd(draw(ops, 20, 7), none).shape == (20, 0)
    dw = draw(ops, 5, 7)
    before = dw.copy()
    ops.linear_dw(np.empty((0, 5), ops.dtype), none, dw)
    assert np.array_equal(dw, before)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_blas_takes_over_where_there_is_no_avx512(ops, biased, added):
    a, b = draw(ops, 30, 40), draw(ops, 40, 50)
    bias = draw(ops, 50) if biased else None
    onto = draw(ops, 30, 50) if added else None
    wanted = a @ b + (bias if biased else 0) + (onto if added else 0)
    out = np.full((30, 50), np.nan, ops.dtype)
    blas.multiply(a, b, out, bias=bias, onto=onto)
    assert_close(out, wanted, ERROR[ops.dtype.name])
