"""Counter-based random numbers: published vectors, slices and moments."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.ops.base import Ops
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.philox import normal_at, philox4x32, stream_key, uniform_rows

KEY = stream_key(7, "some.site")
ONES = 0xFFFFFFFF
DRAWS = 100_000
# Known answers of the Random123 library, philox4x32 with 10 rounds.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_words_are_those_of_random123(counter, key, words):
    assert tuple(int(w) for w in philox4x32(counter, key)) == words
    stretched = tuple(np.full((2, 3), c) for c in counter)
    for word, expected in zip(philox4x32(stretched, key), words, strict=True):
        assert word.dtype == np.uint32 and word.shape == (2, 3)
        assert (word == expected).all()


def test_every_counter_word_and_key_word_matters():
    whole = {tuple(int(w) for w in philox4x32((0, 0, 0, 0), (0, 0)))}
    for place in range(4):
        counter = [0, 0, 0, 0]
        counter[place] = 1
        whole.add(tuple(int(w) for w in philox4x32(tuple(counter), (0, 0))))
    for key in ((1, 0), (0, 1)):
        whole.add(tuple(int(w) for w in philox4x32((0, 0, 0, 0), key)))
    assert len(whole) == 7


def test_streams_of_other_names_and_seeds_have_other_keys():
    keys = {stream_key(seed, name) for seed in (0, 1, 1 << 32) for name in ("a", "b")}
    assert len(keys) == 6
    assert all(0 <= word <= ONES for key in keys for word in key)


# --- uniform numbers ------------------------------------------------------------------


@given(start=st.integers(0, 40), width=st.integers(0, 40))
def test_uniform_rows_from_any_start_are_a_slice_of_the_whole(start, width):
    rows = np.arange(3)[:, None], np.arange(2)[None, :], 5
    whole = uniform_rows(80, rows, KEY)
    part = uniform_rows(width, rows, KEY, start=start)
    assert part.dtype == np.float32 and part.shape == (3, 2, width)
    assert np.array_equal(part, whole[..., start : start + width])


def test_uniform_rows_depend_on_their_own_counters_alone():
    rows = np.arange(5)[:, None], np.arange(4)[None, :], 9
    whole = uniform_rows(7, rows, KEY)
    assert np.array_equal(uniform_rows(7, (3, 2, 9), KEY), whole[3, 2])
    for other in ((2, 3, 9), (3, 2, 8), (3, 1, 9)):
        assert not np.array_equal(uniform_rows(7, other, KEY), whole[3, 2])


def test_uniform_numbers_are_24_bits_in_the_unit_interval():
    u = uniform_rows(DRAWS, (0, 0, 0), KEY).astype(np.float64)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert np.array_equal(u * 2.0**24, np.floor(u * 2.0**24))
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() - 1 / 12) < 0.002


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dropout_keeps_its_share_and_scales_it(rate, dtype):
    factors = NumpyOps(dtype).dropout_scale(rate, DRAWS, (0, 0, 0), KEY)
    kept = factors[factors != 0.0]
    assert factors.dtype == dtype
    assert abs(kept.size / DRAWS - (1 - rate)) < 0.02
    assert (kept == np.dtype(dtype).type(1 / (1 - rate))).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("start", "width"), [(0, 1), (0, 8), (3, 2), (5, 130)])
def test_kernels_drop_what_the_reference_drops(start, width, dtype):
    rows = np.arange(3)[:, None], np.arange(1 << 32, (1 << 32) + 2)[None, :], 5
    for rate in (0.1, 0.5):
        arguments = rate, width, rows, KEY
        ours = NumpyOps(dtype, 2).dropout_scale(*arguments, start=start)
        assert np.array_equal(
            ours, Ops(dtype=dtype).dropout_scale(*arguments, start=start)
        )


# --- normal numbers -------------------------------------------------------------------


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=30))
def test_normal_at_any_indices_is_a_slice_of_the_whole(indices):
    whole = _whole_normal()
    assert np.array_equal(normal_at(np.array(indices), KEY), whole[indices])


@cache
def _whole_normal():
    return normal_at(np.arange(20_001), KEY)


def test_normal_numbers_have_the_moments_of_the_normal_law():
    z = normal_at(np.arange(DRAWS), KEY)
    assert z.dtype == np.float64 and np.isfinite(z).all()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs((z**power).mean() - moment) < 0.1
    assert abs(z.mean()) < 0.015 and abs(z.std() - 1) < 0.01
    # Box-Muller pairs and neighbouring counters are independent.
    for lag in (1, 2):
        assert abs((z[:-lag] * z[lag:]).mean()) < 0.015


def test_normal_numbers_reach_indices_beyond_32_bits():
    index = np.array([0, 1 << 33, 1 << 34, (1 << 34) + 1], np.int64)
    assert len(set(normal_at(index, KEY))) == 4


def test_kernels_fill_with_the_numbers_of_the_reference():
    shape, box = (1 << 20, 1 << 14), ((5, 300), (7, 12))
    expected = fill(shape, box)
    assert np.allclose(fill(shape, box, kind=NumpyOps), expected, rtol=1e-13, atol=0)


def fill(shape, box, dtype="float64", name="a.weight", seed=3, std=0.02, kind=Ops):
    out = np.empty([hi - lo for lo, hi in box], dtype)
    kind(dtype=dtype).fill_normal(
        out, std=std, seed=seed, name=name, shape=shape, box=box
    )
    return out


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return tuple(shape), tuple((lo, hi) for lo, hi in ends)


@settings(max_examples=60)
@given(boxes(), st.sampled_from(["float32", "float64"]))
def test_filling_a_box_gives_the_box_of_the_whole_tensor(shape_and_box, dtype):
    shape, box = shape_and_box
    whole = fill(shape, tuple((0, n) for n in shape), dtype)
    cut = tuple(slice(lo, hi) for lo, hi in box)
    assert np.array_equal(fill(shape, box, dtype), whole[cut])


def test_float32_weights_are_the_rounded_float64_weights():
    shape, box = (130, 70), ((0, 130), (0, 70))
    double = fill(shape, box)
    assert np.array_equal(fill(shape, box, "float32"), double.astype("float32"))


def test_weights_scale_with_std_and_differ_by_name_and_seed():
    shape, box = (64, 64), ((0, 64), (0, 64))
    base = fill(shape, box)
    assert abs(base.std() / 0.02 - 1) < 0.05
    np.testing.assert_allclose(fill(shape, box, std=0.5), 25 * base, rtol=1e-14)
    for other in (fill(shape, box, name="b.weight"), fill(shape, box, seed=4)):
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.06
