"""Attention by tiles against dense softmax attention."""

import tracemalloc

import numpy as np
import pytest
from dense import HEADS, Counting, count_gemm, dense, dense_grads, inputs
from dense import backward as any_backward
from numeric import assert_close, numeric_gradient

from mpipar.ops.attention import KEY_TILE, QUERY_TILE
from mpipar.ops.base import Ops
from mpipar.ops.kernels import attention as kernel
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.spans import causal_spans

LENGTHS = [1, 2, 7, 31, 32, 33, 127, 128, 129, 224, 300, 700]
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}
heads = pytest.mark.parametrize("n, g", HEADS.values(), ids=HEADS)


def attend(ops, q, k, v, offset=0, **options):
    """o and log-sum-exp where query i sees keys 0 … offset + i."""
    options["spans"] = causal_spans(q.shape[1], offset)
    return ops.attention_fwd(q, k, v, **options)


def backward(*arguments, **options):
    """What is added to dq, dk, dv where a query sees the keys before it."""
    spans = causal_spans(arguments[1].shape[1])
    return any_backward(*arguments, spans=spans, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("s", LENGTHS)
@heads
def test_outputs_and_gradients_are_those_of_dense_attention(s, n, g, dtype):
    ops, tolerance = NumpyOps(dtype), TOLERANCE[dtype]
    q, k, v = inputs(s, n, g, dtype=dtype)
    do = np.random.default_rng(1).standard_normal(q.shape).astype(dtype)
    kept = [x.copy() for x in (do, q, k, v)]
    o, lse = attend(ops, q, k, v, scale=0.6)
    assert o.dtype == lse.dtype == dtype
    expected = dense(q, k, v, 0.6)
    assert_close(o, expected[0], tolerance, "o")
    assert_close(lse, expected[1], tolerance, "lse")
    grads = backward(ops, do, q, k, v, o, lse, scale=0.6)
    # At s = 1 the gradients of q and k are zero: their rounding is judged apart.
    for name, x, y in list(
        zip("qkv", grads, dense_grads(do, q, k, v, 0.6), strict=True)
    )[2 * (s == 1) :]:
        assert_close(x, y, tolerance, f"d{name}")
    for before, x in zip(kept, (do, q, k, v), strict=True):
        assert np.array_equal(before, x)


@pytest.mark.parametrize("ops", [Ops(), NumpyOps("float64")], ids=["Ops", "NumpyOps"])
@heads
def test_gradients_are_finite_differences(ops, n, g):
    q, k, v = inputs(4, n, g, b=1, h=3)
    do = np.random.default_rng(1).standard_normal(q.shape)

    def forward():
        return attend(ops, q, k, v, scale=0.6)

    grads = backward(ops, do, q, k, v, *forward(), scale=0.6)
    for gradient, x in zip(grads, (q, k, v), strict=True):
        expected = numeric_gradient(lambda: float((forward()[0] * do).sum()), x)
        assert_close(gradient, expected, 1e-6)


@pytest.mark.parametrize("s, t", [(1, 1), (1, 9), (3, 130), (5, 513), (130, 700)])
@heads
def test_queries_behind_cached_keys_see_all_of_them(s, t, n, g):
    q, k, v = inputs(s, n, g, t=t)
    o, lse = attend(NumpyOps("float64"), q, k, v, t - s, scale=0.6)
    expected = dense(q, k, v, 0.6)
    assert_close(o, expected[0], 1e-12)
    assert_close(lse, expected[1], 1e-12)


def test_one_query_at_a_time_gives_the_whole_sequence():
    q, k, v = inputs(140, 4, 2)
    ops = NumpyOps("float64")
    whole, _ = attend(ops, q, k, v, scale=0.6)
    for i in (0, 1, 127, 128, 139):
        seen = slice(0, i + 1)
        one, _ = attend(
            ops, q[:, i : i + 1], k[:, seen], v[:, seen], scale=0.6, offset=i
        )
        assert_close(one[:, 0], whole[:, i], 1e-13)


@pytest.mark.parametrize("s", [7, 300, 700])
@heads
def test_dropout_factors_are_applied_tile_by_tile(s, n, g):
    ops = NumpyOps("float64")
    q, k, v = inputs(s, n, g)
    rng = np.random.default_rng(2)
    factors = (rng.random((2, n, s, s)) > 0.4) / 0.6
    do = rng.standard_normal(q.shape)
    options = {"scale": 0.6, "dropout": lambda *tile: factors[tile]}
    o, lse = attend(ops, q, k, v, **options)
    expected = dense(q, k, v, 0.6, factors=factors)
    assert_close(o, expected[0], 1e-12)
    assert_close(lse, expected[1], 1e-12)
    grads = backward(ops, do, q, k, v, o, lse, **options)
    for x, y in zip(grads, dense_grads(do, q, k, v, 0.6, factors=factors), strict=True):
        assert_close(x, y, 1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("s", [1, 7, 300])
def test_scores_of_500_stay_finite_without_warning(s, dtype):
    ops = NumpyOps(dtype)
    q, k, v = inputs(s, 2, 1, h=1, dtype=dtype)
    q[...], k[...] = np.sign(q), 500 * np.sign(k)
    o, lse = attend(ops, q, k, v, scale=1.0)
    expected = dense(q, k, v, 1.0)
    assert_close(o, expected[0], 1e-5)
    assert_close(lse, expected[1], 1e-5)
    do = np.ones_like(o)
    for x in backward(ops, do, q, k, v, o, lse, scale=1.0):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("h", [1, 3, 64])
@heads
def test_one_position_passes_its_value_and_its_gradient_on(n, g, h, b, dtype):
    """A12"""
    q, k, v = inputs(1, n, g, b=b, h=h, dtype=dtype)
    (o, _), (_, _, dv), do = one_position(q, k, v)
    assert np.array_equal(o, np.repeat(v, n // g, axis=2))
    assert_close(dv, do.reshape(b, 1, g, n // g, h).sum(3), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("h", [3, 64])
@heads
def test_one_position_has_no_gradient_of_query_and_key(n, g, h, dtype):
    """A12"""
    _, (dq, dk, _), _ = one_position(*inputs(1, n, g, h=h, dtype=dtype))
    assert not dq.any() and not dk.any()


def one_position(q, k, v):
    """(o, lse), (dq, dk, dv) and the upstream gradient."""
    ops, scale = NumpyOps(q.dtype), q.shape[-1] ** -0.5
    do = np.random.default_rng(1).standard_normal(q.shape).astype(q.dtype)
    forward = attend(ops, q, k, v, scale=scale)
    return forward, backward(ops, do, q, k, v, *forward, scale=scale), do


# --- what tiles save ------------------------------------------------------------------


def test_no_array_of_all_scores_exists():
    s, ops = 4096, NumpyOps("float32")
    q, k, v = inputs(s, 1, 1, b=1, h=8, dtype="float32")
    tracemalloc.start()
    o, lse = attend(ops, q, k, v, scale=0.6)
    backward(ops, o, q, k, v, o, lse, scale=0.6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < s * s * 4 / 16


def causal_tiles(s, query_tile, key_tile):
    """(queries, keys) of each tile that a causal pass must work on."""
    for start in range(0, s, query_tile):
        stop = min(start + query_tile, s)
        for first in range(0, stop, key_tile):
            yield stop - start, min(first + key_tile, stop) - first


@pytest.mark.parametrize("s", [1, 129, 512, 700])
@heads
def test_tiles_in_the_future_are_skipped(s, n, g):
    ops, h = Ops(), 4
    q, k, v = inputs(s, n, g, b=1, h=h)
    tiles = list(causal_tiles(s, QUERY_TILE, KEY_TILE))
    scores = 2 * n * h * sum(rows * cols for rows, cols in tiles)
    ops.xp = forward = Counting()
    o, lse = attend(ops, q, k, v, scale=0.6)
    assert forward.flops == 2 * scores
    assert forward.products % len(tiles) == 0
    ops.xp = counted = Counting()
    backward(ops, o, q, k, v, o, lse, scale=0.6)
    assert counted.flops == 5 * scores
    # Whole tiles on the diagonal are all that is spent beyond the exact causal half.
    exact = n * ops.attention_flops(s * (s + 1) // 2, h)
    assert exact == 2 * 2 * n * h * s * (s + 1) // 2
    assert exact <= forward.flops <= exact + 2 * n * h * s * QUERY_TILE * 2


@pytest.mark.parametrize("s", [1, 33, 225, 500])
@heads
def test_kernels_skip_tiles_in_the_future(s, n, g):
    ops, h = NumpyOps("float64"), 4
    q, k, v = inputs(s, n, g, b=1, h=h)
    products = count_gemm(ops)
    tiles = list(causal_tiles(s, kernel.QUERY_TILE, kernel.KEY_TILE))
    scores = 2 * n * h * sum(rows * cols for rows, cols in tiles)
    o, lse = attend(ops, q, k, v, scale=0.6)
    assert sum(products) == 2 * scores
    products.clear()
    backward(ops, o, q, k, v, o, lse, scale=0.6)
    assert sum(products) == 5 * scores


def test_dropout_tiles_cover_the_causal_half_once():
    s, seen = 700, np.zeros((2, 4, 700, 700), int)

    def tile(*where):
        seen[where] += 1
        return np.ones(seen[where].shape)

    q, k, v = inputs(s, 4, 2, h=2)
    attend(NumpyOps("float64"), q, k, v, scale=0.6, dropout=tile)
    assert (seen[..., np.tri(s, dtype=bool)] == 1).all()
    assert seen.max() == 1
