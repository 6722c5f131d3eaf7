"""Stochastic rounding: right in the mean, the same bits whoever draws."""

import numpy as np
import pytest
from numeric import from_half
from parity.build import make_recipe

from mpipar.errors import ConfigError
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops
from mpipar.ops.half import HALVES, narrow_stochastic
from mpipar.ops.half_ops import HalfOps
from mpipar.ops.philox import philox4x32, stream_key
from mpipar.zero.flat import Unit
from mpipar.zero.rounding import Rounding

DRAWS = 1 << 16
# 1/3 of the way between neighbours and so on; of fp16 also what has a fixed last place
SOME = [1 + 2**-7 / 3, -3.14159274, 1e-3, 2.0**-15 * 1.2345, -3e-8, 1e-12, 6e4]
# Smallest and largest numbers of both types, infinity
EXACT = [0.0, -0.0, 1.0, -1.5, 2.0**-14, 2.0**-24, 65280.0, np.inf, -np.inf]


def drawn(x, half, words):
    x = np.full(len(words), x, np.float32)
    return from_half(narrow_stochastic(x, words, np.empty(len(words), HALVES[half])))


def uniform(seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, DRAWS, dtype=np.uint32)


def neighbours(x, half):
    """The numbers of a type below and above one that lies between them."""
    bits = 8 if half == "bf16" else 11
    place = max(np.floor(np.log2(abs(x))), -14.0 if half == "fp16" else -126.0)
    unit = 2.0 ** (place - bits + 1)
    return np.floor(x / unit) * unit, np.ceil(x / unit) * unit


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("x", SOME)
def test_the_mean_is_the_number_itself(x, half):
    x = float(np.float32(x))
    low, high = neighbours(x, half)
    found = drawn(x, half, uniform()).astype(np.float64)
    assert set(found) <= {low, high}
    error = np.sqrt((high - x) * (x - low) / DRAWS)
    assert abs(found.mean() - x) <= 4 * error + 1e-9 * (high - low)


@pytest.mark.parametrize("half", HALVES)
def test_each_word_says_up_or_down_by_a_plain_formula(half):
    words = uniform(3)
    for x in np.random.default_rng(1).standard_normal(20).astype(np.float32) / 50:
        x = float(x)
        low, high = neighbours(x, half)
        away = (abs(x) - min(abs(low), abs(high))) / (high - low)
        steps = 2**16 if half == "bf16" else 2**32
        up = words // (2**32 // steps) >= steps - away * steps
        far, near = (high, low) if x > 0 else (low, high)
        assert np.array_equal(drawn(x, half, words), np.where(up, far, near))


@pytest.mark.parametrize("half", HALVES)
def test_what_a_type_has_stays_as_it_is(half):
    words = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    for x in EXACT:
        found = drawn(x, half, words)
        assert np.array_equal(found, np.full(4, x, np.float32))
        assert np.array_equal(np.signbit(found), np.full(4, np.signbit(x)))
    assert np.isnan(drawn(np.nan, half, words)).all()
    largest = np.uint32(0xFFFFFFFF).view(np.float32), np.uint32(0x7FFFFFFF)
    for nan in (largest[0], largest[1].view(np.float32)):
        assert np.isnan(drawn(nan, half, words)).all()
    below_infinity = np.finfo(np.float32).max
    assert set(drawn(below_infinity, half, words)) <= {
        np.inf, float(np.float32(2.0**128 - 2.0**120)),
    }  # fmt: skip


KINDS = [(Ops, half) for half in HALVES] + [(HalfOps, half) for half in HALVES]


def made(kind, half):
    return Ops(dtype="float32", half=half) if kind is Ops else HalfOps(half, 2)


@pytest.mark.parametrize(("kind", "half"), KINDS)
def test_any_part_of_a_tensor_has_the_bits_of_the_whole(kind, half, monkeypatch):
    monkeypatch.setattr("mpipar.ops.team.WORTHWHILE", 0)
    monkeypatch.setattr("mpipar.ops.random._BLOCK", 7)
    shape, seed = (9, 10), 5 + 2**40
    whole = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    counters = (np.arange(23), 0, 4, 0)
    words = np.stack(philox4x32(counters, stream_key(seed, "w.rounding")), -1)
    plain = Ops(dtype="float32", half=half).empty_operand((90,))
    narrow_stochastic(whole.reshape(-1), words.reshape(-1)[:90], plain)
    rounding = Rounding(made(kind, half), seed)
    rounding.updates = 4
    for box in (
        ((0, 9), (0, 10)),
        ((2, 5), (0, 10)),
        ((0, 9), (3, 8)),
        ((1, 8), (9, 10)),
    ):
        inside = tuple(slice(*interval) for interval in box)
        own = np.ascontiguousarray(whole[inside]).reshape(-1)
        before = Parameter("v", (3,), ((0, 3),), "zeros")
        unit = Unit([before, Parameter("w", shape, box, "normal")], 0, 8)
        x = np.zeros(unit.size, np.float32)
        x[3 : 3 + own.size] = own
        for begin, end in ((0, unit.size), (5, unit.size), (2, 9)):
            out = rounding.ops.empty_operand((end - begin,))
            out[...] = 7
            rounding.store(unit, begin, x[begin:end], out)
            lo, hi = max(3, begin), min(3 + own.size, end)
            right = plain.reshape(shape)[inside].reshape(-1)[lo - 3 : hi - 3]
            assert np.array_equal(out[lo - begin : hi - begin], right)
            assert (out[unit.filled - begin :] == 7).all()


def test_each_update_and_tensor_and_seed_has_its_own_draws():
    ops, x = made(Ops, "bf16"), np.full(4096, 1 + 2**-8, np.float32)
    found = []
    for seed, name, updates in ((1, "w", 1), (1, "w", 2), (2, "w", 1), (1, "u", 1)):
        rounding, out = Rounding(ops, seed), ops.empty_operand(x.shape)
        rounding.updates = updates
        unit = Unit([Parameter(name, (4096,), ((0, 4096),), "zeros")], 0, 1)
        rounding.store(unit, 0, x, out)
        found.append(from_half(out) > 1.004)
    for i in range(4):
        for j in range(i):
            # Coins that have nothing to do with each other: 4 standard errors
            assert abs((found[i] == found[j]).mean() - 0.5) <= 4 * 0.5 / 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.precision=fp32", '"nearest", or train.precision = "bf16" or "fp16"'),
        ("train.precision=fp64", "is for weights of 16 bits"),
        ("train.precision=bf16 parallel.pipeline=2 parallel.schedule=2bw "
         "train.micro_batch=12", 'try optimizer.rounding = "nearest", or'),
    ],
)  # fmt: skip
def test_draws_need_16_bits_and_one_state(words, said):
    with pytest.raises(ConfigError) as error:
        make_recipe(2, "optimizer.rounding=stochastic", *words.split())
    assert said in str(error.value) and len(error.value.violations) == 1
