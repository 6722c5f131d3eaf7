"""Stochastic rounding by its CUDA kernel: the bits of the reference."""

import numpy as np
import pytest
from gpu.shim.compile import GXX
from gpu.test_kernels import on_cpu

from mpipar.ops import Ops
from mpipar.ops.philox import stream_key

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

# What is 0 where tiny floats count as 0, what 16 bits cannot hold, what is no number
RARE = [
    0.0,
    -0.0,
    1e-40,
    2.0**-65,
    -3e-8,
    5e-7,
    6.1e-5,
    65519.0,
    7e4,
    -3.4e38,
    np.inf,
    np.nan,
]
# begin, (first, width, stride): a whole tensor, rows of it, columns of it, a part that
# begins inside of a counter, rows of one element, and an index of more than 32 bits
PLACES = [(0, (0, 64, 64)), (128, (640, 64, 64)), (7, (32, 32, 64)), (2, (5, 1, 9)),
          (3, (1, 1001, 1001)), (1, (2**35 + 2, 5, 11))]  # fmt: skip


def cases():
    rng = np.random.default_rng(4)
    for size in (1, 5, 1500):
        x = (rng.standard_normal(size) / 2.0 ** rng.integers(0, 30, size)).astype("f4")
        x[: len(RARE)] = RARE[:size]
        for begin, rows in PLACES:
            yield x, {"begin": begin, "rows": rows, "step": 2**33 + size,
                      "key": stream_key(2**40 + 7, "w")}  # fmt: skip


def rounded(ops, x, where, shift=0):
    """The bits, of arrays that begin `shift` items behind an even address."""
    own = np.zeros(x.size + shift, np.float32)[shift:]
    out = np.full(x.size + shift + 1, 7, ops.operand_dtype)
    own[...] = x
    ops.store_stochastic(own, out[shift:-1], **where)
    assert out[-1] == 7 and (out[:shift] == 7).all()
    return out[shift:-1].view(np.uint16)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_the_kernel_rounds_as_the_reference(half):
    reference = Ops(dtype="float32", half=half)
    orders = [on_cpu(half, backwards=backwards) for backwards in (False, True)]
    for x, where in cases():
        right = rounded(reference, x, where)
        for ops in orders:
            for shift in (0, 1):
                assert np.array_equal(rounded(ops, x, where, shift), right), where


@pytest.mark.parametrize(
    "edit",
    [
        ("|| column == 0 || index % 4 == 0", "|| index % 4 == 0"),
        ("|| column == 0 || index % 4 == 0", "|| column == 0"),
        ("uint32(index >> 34)", "0"),
        ("mantissa << 32 >> dropped", "mantissa << 32 >> 13"),
    ],
    ids=["rows share words", "counters share words", "32 bits", "small numbers"],
)
def test_faults_of_the_kernel_are_found(edit):
    reference, wrong = Ops(dtype="float32", half="fp16"), on_cpu("fp16", edit=edit)
    assert any(
        not np.array_equal(rounded(reference, x, where), rounded(wrong, x, where))
        for x, where in cases()
    )
