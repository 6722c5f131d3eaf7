"""Attention over spans of keys: any mask of them, parts of the keys, empty rows."""

import itertools

import numpy as np
import pytest
from dense import (
    HEADS,
    Counting,
    backward,
    count_gemm,
    dense,
    dense_grads,
    inputs,
)
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_close

from mpipar.ops import Ops
from mpipar.ops.attention import KEY_TILE, QUERY_TILE
from mpipar.ops.kernels import attention as kernel
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.spans import causal_spans, pairs, reach, spans_between

KINDS = {
    "Ops": lambda dtype: Ops(dtype=dtype),
    "NumpyOps": NumpyOps,
    "two threads": lambda dtype: NumpyOps(dtype, 2),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
heads = pytest.mark.parametrize("n, g", HEADS.values(), ids=HEADS)
# Queries and keys, within tiles and across them
SIZES = [(1, 1), (1, 9), (7, 3), (40, 300), (200, 70), (150, 600)]
SCALE = 0.6


@pytest.fixture(autouse=True)
def _share_little_work(monkeypatch):
    monkeypatch.setattr("mpipar.ops.team.WORTHWHILE", 0)


# --- spans ----------------------------------------------------------------------------


@st.composite
def sequences(draw):
    """Positions of a rank's queries and another's keys, first positions seen."""
    length = draw(st.integers(1, 40))
    ascending = st.sets(st.integers(0, length - 1)).map(sorted)
    queries, keys = (np.array(draw(ascending), np.int64) for _ in "12")
    window, batch = draw(st.sampled_from([0, 1, 2, 7])), draw(st.integers(1, 2))
    begins = draw(st.lists(st.sets(st.integers(0, length)), min_size=2, max_size=2))
    firsts = np.zeros((batch, len(queries)), np.int64)
    for sequence, i in np.ndindex(firsts.shape):
        p = int(queries[i])
        firsts[sequence, i] = max([b for b in begins[sequence] if b <= p], default=0)
        if window:
            firsts[sequence, i] = max(firsts[sequence, i], p - window + 1)
    return queries, firsts, keys


@given(sequences())
def test_a_query_sees_the_positions_from_its_first_to_its_own(sequence):
    queries, firsts, keys = sequence
    spans = spans_between(queries, firsts, keys)
    assert spans.shape == (3, *firsts.shape) and spans.dtype == np.int64
    assert spans.flags.c_contiguous
    count = 0
    for b, i in np.ndindex(firsts.shape):
        seen = range(firsts[b, i], queries[i] + 1)
        begin, end, total = spans[:, b, i]
        assert [int(p) in seen for p in keys] == [
            begin <= j < end for j in range(len(keys))
        ]
        assert 0 <= begin <= end <= len(keys) and total == len(seen)
        count += end - begin
    assert pairs(spans) == count


@given(sequences(), st.integers(0, 20), st.integers(0, 20))
def test_the_reach_of_queries_is_from_the_first_to_the_last_key_seen(
    sequence, start, size
):
    spans, rows = spans_between(*sequence), slice(start, start + size)
    begins, ends = spans[0, :, rows].ravel(), spans[1, :, rows].ravel()
    seen = [j for b, e in zip(begins, ends, strict=True) for j in range(b, e)]
    lo, hi = reach(spans, rows)
    assert (lo, hi) == ((min(seen), max(seen) + 1) if seen else (0, 0))


@pytest.mark.parametrize("s, offset", [(1, 0), (5, 0), (3, 4)])
def test_causal_spans_are_those_of_all_positions(s, offset):
    queries = offset + np.arange(s)
    firsts = np.zeros((1, s), np.int64)
    expected = spans_between(queries, firsts, np.arange(offset + s))
    assert np.array_equal(causal_spans(s, offset), expected)


# --- any spans against dense attention ------------------------------------------------


def random_spans(s, t, b=1, seed=0):
    """Any spans of the keys: empty ones, of one key, short and long."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, t + 1, (2, b, s)), axis=0)
    kind = rng.integers(0, 4, (b, s))
    ends[1][kind == 0] = ends[0][kind == 0]
    one = kind == 1
    ends[0][one] = np.minimum(ends[0][one], t - 1)
    ends[1][one] = ends[0][one] + 1
    return np.stack([ends[0], ends[1], ends[1] - ends[0]])


def mask_of(spans, t):
    keys = np.arange(t)
    return (spans[0, ..., None] <= keys) & (keys < spans[1, ..., None])


def keys_within(spans, lo, hi):
    """The same queries over the keys lo .. hi only."""
    part = spans.copy()
    part[:2] = np.clip(spans[:2], lo, hi) - lo
    return part


def upstream(q):
    return np.random.default_rng(1).standard_normal(q.shape).astype(q.dtype)


@kinds
@heads
@pytest.mark.parametrize("s, t", SIZES)
@pytest.mark.parametrize("b", [1, 2], ids=["for all", "for each sequence"])
@pytest.mark.parametrize("drops", [False, True], ids=["", "dropout"])
def test_any_spans_are_dense_attention_under_their_mask(kind, n, g, s, t, b, drops):
    ops, spans = kind("float64"), random_spans(s, t, b)
    q, k, v = inputs(s, n, g, t=t)
    mask, do, factors, options = mask_of(spans, t), upstream(q), 1.0, {}
    if drops:
        factors = (np.random.default_rng(2).random((2, n, s, t)) > 0.4) / 0.6
        options = {"dropout": lambda *tile: factors[tile]}
    options |= {"scale": SCALE, "spans": spans}
    o, lse = ops.attention_fwd(q, k, v, **options)
    expected = dense(q, k, v, SCALE, mask=mask, factors=factors)
    some = np.broadcast_to(mask.any(-1), (2, s))
    assert_close(o, expected[0], 1e-12, "o")
    seen = np.repeat(some[:, None], n, axis=1)
    assert_close(lse[seen], expected[1][seen], 1e-12, "lse")
    assert (lse[~seen] == -np.inf).all() and not o[~some].any()
    grads = backward(ops, do, q, k, v, o, lse, **options)
    right = dense_grads(do, q, k, v, SCALE, mask=mask, factors=factors)
    for name, x, y in zip(("dq", "dk", "dv"), grads, right, strict=True):
        # 7 was there before: what is added is rounded beside it.
        assert np.abs(x - y).max() <= 1e-12 * max(1.0, np.abs(y).max()), name
    assert not grads[0][~some].any()


@kinds
@heads
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_queries_that_see_no_key_give_nothing_and_get_nothing(kind, n, g, dtype):
    """A10"""
    ops, (q, k, v) = kind(dtype), inputs(40, n, g, t=300, dtype=dtype)
    spans = np.zeros((3, 1, 40), np.int64)
    spans[:2] = np.arange(40)
    options = {"scale": SCALE, "spans": spans}
    o, lse = ops.attention_fwd(q, k, v, **options)
    assert not o.any() and (lse == -np.inf).all()
    for x in backward(ops, upstream(q), q, k, v, o, lse, **options):
        assert not x.any()
    # What they see elsewhere changes nothing here.
    lse[...] = 1.0
    for x in backward(ops, upstream(q), q, k, v, o, lse, **options):
        assert not x.any()


@kinds
@heads
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_queries_that_see_one_key_give_its_value_and_have_no_gradient(
    kind, n, g, dtype
):
    """A12: exactly, whichever key it is, and wherever it lies."""
    ops, (q, k, v) = kind(dtype), inputs(40, n, g, t=300, h=64, dtype=dtype)
    keys = np.random.default_rng(0).integers(0, 300, 40)
    spans = np.stack([keys, keys + 1, np.ones_like(keys)])[:, None]
    options = {"scale": SCALE, "spans": spans}
    o, lse = ops.attention_fwd(q, k, v, **options)
    assert np.array_equal(o, np.repeat(v[:, keys], n // g, axis=2))
    do = upstream(q)
    dq, dk, dv = backward(ops, do, q, k, v, o, lse, **options)
    assert not dq.any() and not dk.any()
    expected = np.zeros(v.shape)
    np.add.at(expected, (slice(None), keys), do.reshape(2, 40, g, -1, 64).sum(3))
    assert_close(dv, expected, 1e-12 if dtype == "float64" else 1e-5)
    # One key of another rank leaves nothing for the keys that are here.
    spans[0] = spans[1]
    for x in backward(ops, do, q, k, v, o, lse, **options):
        assert not x.any()


# --- parts of the keys ----------------------------------------------------------------


def parts_of(ops, q, k, v, spans, cuts):
    """(o, lse) over the keys between each two cuts, and those spans."""
    for lo, hi in itertools.pairwise(cuts):
        here = keys_within(spans, lo, hi)
        k_part, v_part = (np.ascontiguousarray(x[:, lo:hi]) for x in (k, v))
        options = {"scale": SCALE, "spans": here, "part": True}
        yield ops.attention_fwd(q, k_part, v_part, **options), here


@kinds
@heads
@pytest.mark.parametrize("cuts", [[0, 100, 300], [0, 1, 130, 300], [0, 300, 300]])
def test_parts_merged_in_any_order_are_attention_over_all_keys(kind, n, g, cuts):
    ops, (q, k, v) = kind("float64"), inputs(40, n, g, t=300)
    spans = random_spans(40, 300, 2)
    whole = ops.attention_fwd(q, k, v, scale=SCALE, spans=spans)
    found = [part for part, _ in parts_of(ops, q, k, v, spans, cuts)]
    for order in itertools.permutations(range(len(found))):
        o, lse = (x.copy() for x in found[order[0]])
        for place in order[1:]:
            kept = [x.copy() for x in found[place]]
            ops.attention_merge(o, lse, *found[place])
            assert all(map(np.array_equal, kept, found[place]))
        assert_close(o, whole[0], 1e-13)
        seen = np.isfinite(whole[1])
        assert_close(lse[seen], whole[1][seen], 1e-13)
        assert (lse[~seen] == -np.inf).all() and np.isfinite(o).all()
        assert not o.swapaxes(1, 2)[~seen].any()


@kinds
@heads
def test_gradients_of_parts_add_up_to_those_over_all_keys(kind, n, g):
    ops, (q, k, v) = kind("float64"), inputs(40, n, g, t=300)
    spans, cuts, do = random_spans(40, 300, 2), [0, 90, 91, 300], upstream(q)
    o, lse = ops.attention_fwd(q, k, v, scale=SCALE, spans=spans)
    dq, (dk, dv) = np.zeros_like(q), (np.zeros(x.shape) for x in (k, v))
    for lo, hi in itertools.pairwise(cuts):
        here = slice(lo, hi)
        ops.attention_bwd(
            do, q, k[:, here], v[:, here], o, lse, dq=dq, dk=dk[:, here],
            dv=dv[:, here], scale=SCALE, spans=keys_within(spans, lo, hi),
        )  # fmt: skip
    right = dense_grads(do, q, k, v, SCALE, mask=mask_of(spans, 300))
    for x, y in zip((dq, dk, dv), right, strict=True):
        assert_close(x, y, 1e-12)


@kinds
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_merging_with_nothing_changes_no_bit(kind, dtype):
    """A10: −inf on either side, or on both."""
    ops, rng = kind(dtype), np.random.default_rng(0)
    o, part = (rng.standard_normal((2, 9, 3, 5)).astype(dtype) for _ in "12")
    lse, level = (rng.standard_normal((2, 3, 9)).astype(dtype) for _ in "12")
    lse[:, :, ::3], level[:, :, 1::3] = -np.inf, -np.inf
    lse[:, :, 8] = level[:, :, 8] = -np.inf
    for x, missing in ((o, lse), (part, level)):
        x.swapaxes(1, 2)[missing == -np.inf] = 0.0
    merged, total = o.copy(), lse.copy()
    ops.attention_merge(merged, total, part, level)
    assert np.array_equal(merged[:, ::3], part[:, ::3])
    assert np.array_equal(merged[:, 1::3], o[:, 1::3])
    assert np.array_equal(total[:, :, ::3], level[:, :, ::3])
    assert np.array_equal(total[:, :, 1::3], lse[:, :, 1::3])
    assert not merged[:, 8].any() and (total[:, :, 8] == -np.inf).all()
    assert np.isfinite(total[:, :, 2:8:3]).all()


@kinds
@pytest.mark.parametrize("cuts", [[0, 300], [0, 100, 300], [0, 1, 2, 150, 300]])
def test_scores_of_500_merge_to_five_digits_in_fp32(kind, cuts):
    ops, (q, k, v) = kind("float32"), inputs(40, 2, 1, t=300, h=1, dtype="float32")
    q[...], k[...] = np.sign(q), 500 / SCALE * np.sign(k)
    spans = random_spans(40, 300)
    mask = mask_of(spans, 300)
    expected = dense(q, k, v, np.float32(SCALE), mask=mask)
    (first, _), *others = parts_of(ops, q, k, v, spans, cuts)
    o, lse = first
    for part, _ in others:
        ops.attention_merge(o, lse, *part)
    seen = np.isfinite(lse)
    assert np.array_equal(seen, np.isfinite(expected[1]))
    assert_close(o, expected[0], 1e-5)
    assert_close(lse[seen], expected[1][seen], 1e-5)
    for x in backward(ops, upstream(q), q, k, v, o, lse, scale=SCALE, spans=spans):
        assert np.isfinite(x).all()


# --- what tiles save ------------------------------------------------------------------


def banded_spans(name, s):
    """Spans of s positions: a window, documents, or another rank's keys."""
    places = np.arange(s)
    firsts = np.zeros((1, s), np.int64)
    if name == "window":
        return spans_between(places, np.maximum(firsts, places - 49), places)
    if name == "documents":
        return spans_between(places, firsts + places // 150 * 150, places)
    if name == "striped":
        return spans_between(4 * places + 1, firsts, 4 * places + 2)
    chunks = np.concatenate([places[: s // 2], places[: s // 2] + 3 * (s // 2)])
    return spans_between(chunks, firsts, s // 2 + places)


def worked_on(spans, t, query_tile, key_tile):
    """Scores of all tiles that some query of theirs sees, by looking at the mask."""
    mask, scores = mask_of(spans, t)[0], 0
    for start in range(0, len(mask), query_tile):
        rows = mask[start : start + query_tile]
        seen = np.flatnonzero(rows.any(0))
        scores += len(rows) * (seen[-1] + 1 - seen[0]) if seen.size else 0
    return scores


@heads
@pytest.mark.parametrize("name", ["window", "documents", "striped", "zigzag"])
def test_tiles_that_no_query_sees_are_skipped(n, g, name):
    s, h, ops = 600, 4, Ops()
    spans, (q, k, v) = banded_spans(name, s), inputs(s, n, g, b=1, h=h)
    options = {"scale": SCALE, "spans": spans}
    scores = 2 * n * h * worked_on(spans, s, QUERY_TILE, KEY_TILE)
    ops.xp = forward = Counting()
    o, lse = ops.attention_fwd(q, k, v, **options)
    assert forward.flops == 2 * scores
    ops.xp = counted = Counting()
    backward(ops, o, q, k, v, o, lse, **options)
    assert counted.flops == 5 * scores


@heads
@pytest.mark.parametrize("name", ["window", "documents", "striped", "zigzag"])
def test_kernels_skip_tiles_that_no_query_sees(n, g, name):
    s, h, ops = 600, 4, NumpyOps("float64")
    spans, (q, k, v) = banded_spans(name, s), inputs(s, n, g, b=1, h=h)
    options = {"scale": SCALE, "spans": spans}
    scores = 2 * n * h * worked_on(spans, s, kernel.QUERY_TILE, kernel.KEY_TILE)
    # Little more than what is seen
    assert ops.attention_flops(pairs(spans), h) * n <= 2 * scores
    assert worked_on(spans, s, 32, 224) < 2 * pairs(spans)
    products = count_gemm(ops)
    o, lse = ops.attention_fwd(q, k, v, **options)
    assert sum(products) == 2 * scores
    products.clear()
    backward(ops, o, q, k, v, o, lse, **options)
    assert sum(products) == 5 * scores


def test_dropout_is_drawn_once_for_what_is_seen():
    s, drawn = 600, np.zeros((1, 4, 600, 600), int)

    def tile(*where):
        drawn[where] += 1
        return np.ones(drawn[where].shape)

    spans, (q, k, v) = banded_spans("window", s), inputs(s, 4, 2, b=1, h=2)
    NumpyOps("float64").attention_fwd(q, k, v, scale=SCALE, spans=spans, dropout=tile)
    assert (drawn[:, :, mask_of(spans, s)[0]] == 1).all()
    assert drawn.max() == 1 and drawn.mean() < 0.4
