"""Compiled kernels: exactness of exp, NaN, bf16 bits, threads, the cache folder."""

import subprocess
import sys

import numba
import numpy as np
import pytest
from numeric import assert_close

from mpipar.ops.blas import add_product
from mpipar.ops.kernels import intrinsics
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.spans import causal_spans
from mpipar.ops.team import Team


@numba.njit
def exponentials(x, out):
    for i in range(x.size):
        out[i] = intrinsics.exp(x[i])


@numba.njit
def maxima(x, out):
    for i in range(x.shape[0]):
        out[i] = x[i, 0]
        for j in range(x.shape[1]):
            out[i] = intrinsics.larger(out[i], x[i, j])


@numba.njit
def to_bits(x, out):
    for i in range(x.size):
        out[i] = intrinsics.narrow(x[i], out[i])


@numba.njit
def from_bits(bits, out):
    for i in range(bits.size):
        out[i] = intrinsics.widen(bits[i], out[i])


@pytest.mark.parametrize(
    "dtype, low, high, units", [("float32", -87, 88, 1.5), ("float64", -708, 709, 3)]
)
def test_exp_is_exact_to_a_few_units_in_the_last_place(dtype, low, high, units):
    x = np.linspace(low, high, 200_003).astype(dtype)
    out = np.empty_like(x)
    exponentials(x, out)
    exact = np.exp(x.astype(np.longdouble))
    assert (np.abs(out - exact) / exact).max() < units * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exp_keeps_nan_and_ends_at_its_range(dtype):
    x = np.array([np.nan, -np.inf, -1e30, 1e30, np.inf, 0.0], dtype)
    out = np.empty_like(x)
    exponentials(x, out)
    assert np.isnan(out[0]) and out[5] == 1.0
    assert (out[1:3] < 1e-37).all() and (out[3:5] > 1e37).all()


def test_the_maximum_of_a_row_with_nan_is_nan():
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    x[1, 33] = np.nan
    out = np.empty(3, np.float32)
    maxima(x, out)
    assert np.isnan(out[1]) and out[0] == x[0].max() and out[2] == x[2].max()


def test_bf16_bits_round_to_the_nearest_even_and_keep_nan():
    numbers = [1.0, 1.00390625, 1.01171875, -2.5, 3.3895314e38, np.inf, -np.inf, np.nan]
    x = np.array(numbers, np.float32)
    bits, back = np.empty(x.size, np.uint16), np.empty_like(x)
    to_bits(x, bits)
    from_bits(bits, back)
    expected = [1.0, 1.0, 1.015625, -2.5, 3.3895314e38, np.inf, -np.inf]
    assert back[:-1].tolist() == np.array(expected, np.float32).tolist()
    assert np.isnan(back[-1])
    exact = np.arange(0, 1 << 16, dtype=np.uint16)
    wide, again = np.empty(exact.size, np.float32), np.empty_like(exact)
    from_bits(exact, wide)
    to_bits(wide, again)
    assert np.array_equal(again[~np.isnan(wide)], exact[~np.isnan(wide)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 1, 5), (1, 4, 2), (7, 65, 33)])
def test_a_product_is_added_whatever_the_order_in_memory(m, n, k, dtype):
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
    wide = rng.standard_normal((m, 2 * k)).astype(dtype)
    for left in (a, np.asfortranarray(a), wide[:, :k], wide[:, ::2], wide[::-1, :k]):
        for right in (b, np.asfortranarray(b)):
            out = c.copy()
            add_product(left, right, out)
            assert_close(out, c + left.astype(float) @ right, 1e-5)


def losses_and_gradients(threads, dtype):
    """Results of operations that have sums over rows, on that many threads."""
    ops, rng = NumpyOps(dtype, threads), np.random.default_rng(0)
    x, dy = (rng.standard_normal((4, 150, 96)).astype(dtype) for _ in "12")
    w, b = rng.standard_normal((48, 96)).astype(dtype), np.ones(48, dtype)
    gain, dgain, dbias = (np.ones(96, dtype) for _ in "123")
    y, mean, rstd = ops.layernorm_fwd(x, gain, gain, eps=1e-5)
    dx = ops.layernorm_bwd(dy, x, mean, rstd, gain, dgain=dgain, dbias=dbias, onto=x)
    z, dw = ops.linear_fwd(x, w, b), np.ones_like(w)
    ops.linear_dw(z, x, dw)
    heads = x.reshape(4, 150, 6, 16)
    q, k, v = heads[:, :, :2], heads[:, :, 2:4], heads[:, :, 4:]
    options = {"scale": 0.25, "spans": causal_spans(150)}
    o, lse = ops.attention_fwd(q, k, v, **options)
    grads = np.zeros_like(heads)
    views = {"dq": grads[:, :, :2], "dk": grads[:, :, 2:4], "dv": grads[:, :, 4:]}
    ops.attention_bwd(o, q, k, v, o, lse, **options, **views)
    both, level = np.ones((4, 150, 2, 16), dtype), np.zeros_like(lse)
    ops.attention_merge(both, level, o, lse)
    square = np.array([ops.square_sum(np.tile(x.reshape(-1), 9))])
    return [y, dx, dgain, dbias, z, dw, o, lse, grads, both, level, square]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_results_do_not_depend_on_the_number_of_threads(dtype, monkeypatch):
    monkeypatch.setattr("mpipar.ops.team.WORTHWHILE", 0)
    alone = losses_and_gradients(1, dtype)
    for threads in (2, 3):
        for x, y in zip(losses_and_gradients(threads, dtype), alone, strict=True):
            assert_close(x, y, 1e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_token_gets_of_experts_is_the_same_in_any_company(dtype, monkeypatch):
    """Bit by bit: whatever the threads, and whichever tokens are beside it."""
    monkeypatch.setattr("mpipar.ops.team.WORTHWHILE", 0)
    rng = np.random.default_rng(0)
    t, k, d = 50, 3, 67
    order = rng.permutation(t * k)
    rows, dy = (rng.standard_normal((n, d)).astype(dtype) for n in (t * k, t))
    gates = rng.standard_normal((t, k)).astype(dtype)
    places, (tokens, slots) = order.reshape(t, k), np.indices((t, k)).reshape(2, -1)
    by_choice = rows[order]

    def passed(threads, lo, hi):
        ops, own = NumpyOps(dtype, threads), slice(lo, hi)
        out, dgates = np.ones((hi - lo, d), dtype), np.zeros((hi - lo, k), dtype)
        ops.combine_rows(rows, places[own], gates[own], out=out)
        count = (hi - lo) * k
        dx = ops.combine_rows_bwd(
            dy[own], by_choice[lo * k : hi * k], tokens[:count], slots[:count],
            gates[own], dgates=dgates,
        )  # fmt: skip
        return out, dx.reshape(-1, k, d), dgates

    whole = passed(1, 0, t)
    for threads, lo, hi in ((3, 0, t), (1, 7, 8), (2, 7, 31)):
        for part, x in zip(passed(threads, lo, hi), whole, strict=True):
            assert np.array_equal(part, x[lo:hi])


def test_a_team_covers_all_items_once_and_raises_what_a_part_raises():
    team = Team(3)
    for items in (0, 1, 2, 3, 10, 1000):
        seen = np.zeros(items, int)

        def work(lo, hi, thread, seen=seen):
            assert 0 <= thread < 3
            seen[lo:hi] += 1

        team.share(items, work, 1 << 20)
        assert (seen == 1).all()

    def failing(lo, hi, thread):
        if lo > 0:
            raise ValueError(f"part {thread}")

    with pytest.raises(ValueError, match="part"):
        team.share(9, failing, 1 << 20)
    alone = []
    team.share(9, lambda *part: alone.append(part), 100)
    assert alone == [(0, 9, 0)]


def test_compiled_kernels_are_kept_where_the_user_keeps_caches(tmp_path):
    code = (
        "from mpipar.ops.kernels import compile as c; print(c.numba.config.CACHE_DIR)"
    )
    home, other = tmp_path / "home", tmp_path / "file"
    other.touch()
    for cache, place in ((home, home / "mpipar"), (other, None)):
        env = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        )
        folder = run.stdout.strip()
        assert run.returncode == 0, run.stderr
        assert folder.startswith(str(place or tmp_path / "mpipar-"))
