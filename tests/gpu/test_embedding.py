"""The gradient of an embedding on a GPU, from tokens that are sorted there."""

import numpy as np
import pytest
from gpu.shim.compile import GXX, ShimError
from gpu.test_kernels import on_cpu
from numeric import assert_close

from mpipar.ops.base import Ops
from mpipar.ops.cuda import embedding
from mpipar.ops.cuda.programs import source

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")


def check_embedding(edit=()):
    """Frequent and rare ids, in chunks of their own count, of several blocks."""
    rng = np.random.default_rng(6)
    ids = np.where(rng.random(1000) < 0.6, 4, rng.integers(0, 40, 1000))
    held, dy = (ids >= 3) & (ids < 33), rng.standard_normal((1000, 8))
    right = np.argsort(np.where(held, ids, 99), kind="stable")[: held.sum()]
    want, results = np.zeros((30, 8)), np.zeros((2, 30, 8), np.float32)
    dy = dy.astype(np.float32)
    Ops().embedding_dw(dy.astype(float), ids, want, first=3)
    for backwards in (False, True):
        ops = on_cpu("fp32", backwards=backwards, edit=edit)
        order, keys, begins = ops._sorted(ids, 3, 30)
        assert np.array_equal(np.diff(begins), np.bincount(ids[held] - 3, minlength=30))
        assert np.array_equal(order[: held.sum()], right)
        assert np.array_equal(keys[: held.sum()] + 3, ids[right])
        ops.embedding_dw(dy, ids, results[int(backwards)], first=3)
    assert_close(results[0], want, 1e-6)
    assert np.array_equal(*results)


def test_tokens_of_an_embedding_are_added_in_chunks(monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 300)
    check_embedding()


@pytest.mark.parametrize(
    "edit",
    [
        ("from < at ? blockDim.x : threadIdx.x", "blockDim.x"),
        ("before += own;\n        }\n        begins[row]", "}\n        begins[row]"),
        ("row == key[at + 2];", "at + 1 < high - low && row == key[at + 2];"),
        ("if (is_first && low > 0 && keys[low - 1] == row) return;", ""),
        ("last += SORTED", "last += 2 * SORTED"),
    ],
)
def test_a_fault_in_the_gradient_of_an_embedding_is_caught(edit, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 300)
    assert edit[0] in source("embedding")
    with pytest.raises((AssertionError, ShimError)):
        check_embedding(edit)
