"""Causal attention: scores of a few rows at a time, which stay in the cache.

Shapes as in `mpipar.ops.attention`: q, o, do (b, s, n, h); k, v (b, t, g, h). Work is
cut into pairs of a sequence and a key/value head, lo .. hi of the b·g there are. Each
tile of scores is a product by BLAS, then one pass over it.

Products of at most 10⁶ multiply-adds skip OpenBLAS's packing and run at the full rate
of the core where neither factor is transposed. So tiles are small, and each head's keys
(backward also its values) are turned once, to (h, t).
"""

import math

from mpipar.ops.kernels.blocks import turn
from mpipar.ops.kernels.compile import kernel, part
from mpipar.ops.kernels.intrinsics import exp, gemm, larger, narrow, real, widen

QUERY_TILE = 32
KEY_TILE = 224


@part
def _softmax_rows(scores, cols, sums, rows, seen, fresh):
    """Rows of scores ← exp(score − peak), zero past the keys seen; merges sums.

    sums (rows, h + 2)   each row's Σ p v so far, peak, and mass
    seen                 keys of this tile that the first row sees; one more each row
    """
    h = sums.shape[1] - 2
    zero = real(0.0, scores[0])
    for i in range(rows):
        row = scores[i * cols : (i + 1) * cols]
        visible = min(cols, seen + i)
        if not fresh and visible <= 0:
            row[:] = zero
            continue
        old = row[0] if fresh else sums[i, h]
        top = old
        for j in range(visible):
            top = larger(top, row[j])
        mass = zero
        for j in range(visible):
            e = exp(row[j] - top)
            row[j] = e
            mass += e
        for j in range(visible, cols):
            row[j] = zero
        if not fresh:
            shrink = exp(old - top)
            mass += sums[i, h + 1] * shrink
            for j in range(h):
                sums[i, j] *= shrink
        sums[i, h], sums[i, h + 1] = top, mass


@kernel(
    "(i8, T[:, :, :, :], T[:, :, :, :], T[:, :, :, :], O[:, :, :, ::1], "
    "T[:, :, ::1], T, i8, T[::1], T[:, ::1], T[::1], i8, i8)"
)
def attention(product, q, k, v, o, lse, scale, offset, scores, sums, turned, lo, hi):
    """o = softmax(scale · q kᵀ + mask) v and the log-sum-exp.

    product   address of cblas gemm
    scratch   scores (QUERY_TILE·KEY_TILE,), sums (QUERY_TILE, h + 2), turned (t·h,)
    """
    s, t, h, groups = q.shape[1], k.shape[1], q.shape[3], k.shape[2]
    shared = q.shape[2] // groups
    one, zero = real(1.0, scale), real(0.0, scale)
    item = q.itemsize
    ldq, ldk, ldv = q.strides[1] // item, k.strides[1] // item, v.strides[1] // item
    for task in range(lo * shared, hi * shared):
        b, head = task // (groups * shared), task % (groups * shared)
        g = head // shared
        # A few queries, as in generation, do not pay for turning the keys.
        turns = s >= QUERY_TILE
        if turns and head % shared == 0:
            turn(k[b, :, g], turned, k.shape[1])
        for first in range(0, s, QUERY_TILE):
            rows = min(QUERY_TILE, s - first)
            keys = offset + first + rows
            for start in range(0, keys, KEY_TILE):
                cols = min(KEY_TILE, keys - start)
                ks, ld = k[b, start:, g].ctypes.data, ldk
                if turns:
                    ks, ld = turned.ctypes.data + start * item, t
                gemm(
                    product, False, not turns, rows, cols, h, scale,
                    q[b, first:, head].ctypes.data, ldq, ks, ld, zero,
                    scores.ctypes.data, cols,
                )  # fmt: skip
                seen = offset + first + 1 - start
                _softmax_rows(scores, cols, sums, rows, seen, start == 0)
                gemm(
                    product, False, False, rows, h, cols, one,
                    scores.ctypes.data, cols, v[b, start:, g].ctypes.data, ldv,
                    zero if start == 0 else one, sums.ctypes.data, h + 2,
                )  # fmt: skip
            for i in range(rows):
                lse[b, head, first + i] = sums[i, h] + math.log(sums[i, h + 1])
                share = one / sums[i, h + 1]
                for j in range(h):
                    like = o[b, first + i, head, j]
                    o[b, first + i, head, j] = narrow(sums[i, j] * share, like)


@part
def _score_gradients(p, ds, cols, do, o, lse, first, start, scale, rows):
    """p ← exp(p − lse), ds ← scale · p∘(ds − Σ do·o); zero past the keys seen."""
    zero = real(0.0, scale)
    for i in range(rows):
        at = first + i
        visible = min(cols, at + 1 - start)
        pr, dr = p[i * cols : (i + 1) * cols], ds[i * cols : (i + 1) * cols]
        delta = zero
        for j in range(do.shape[1]):
            delta += do[at, j] * widen(o[at, j], zero)
        level = lse[at]
        for j in range(visible):
            e = exp(pr[j] - level)
            pr[j] = e
            dr[j] = e * (dr[j] - delta) * scale
        for j in range(max(visible, 0), cols):
            pr[j] = zero
            dr[j] = zero
        if at == 0:
            # Query 0 sees key 0 alone: its softmax is constant.
            dr[0] = zero


@kernel(
    "(i8, T[:, :, :, ::1], T[:, :, :, :], T[:, :, :, :], T[:, :, :, :], "
    "O[:, :, :, ::1], T[:, :, ::1], T[:, :, :, :], T[:, :, :, :], T[:, :, :, :], T, "
    "T[:, ::1], T[:, ::1], i8, i8)"
)
def attention_back(
    product, do, q, k, v, o, lse, dq, dk, dv, scale, scratch, turned, lo, hi
):
    """dv = Pᵀ do; dS = P∘(do vᵀ − D), D = Σ do·o; dq = scale·dS k; dk = scale·dSᵀ q.

    The last rows of queries come first: they see every key, so that their products
    write dk and dv, and all later ones add.
    scratch (2, QUERY_TILE·KEY_TILE), turned (2, s·h)
    """
    s, h, groups = q.shape[1], q.shape[3], k.shape[2]
    shared = q.shape[2] // groups
    one, zero = real(1.0, scale), real(0.0, scale)
    item = q.itemsize
    ldq, ldk = q.strides[1] // item, k.strides[1] // item
    lddo, lddq = do.strides[1] // item, dq.strides[1] // item
    lddk, lddv = dk.strides[1] // item, dv.strides[1] // item
    p, ds = scratch[0], scratch[1]
    ps, dss = p.ctypes.data, ds.ctypes.data
    last = (s - 1) // QUERY_TILE * QUERY_TILE
    for task in range(lo * shared, hi * shared):
        b, head = task // (groups * shared), task % (groups * shared)
        g = head // shared
        if head % shared == 0:
            turn(k[b, :, g], turned[0], k.shape[1])
            turn(v[b, :, g], turned[1], v.shape[1])
        for first in range(last, -1, -QUERY_TILE):
            rows = min(QUERY_TILE, s - first)
            qs, dos = q[b, first:, head].ctypes.data, do[b, first:, head].ctypes.data
            begun = zero if first == last and head % shared == 0 else one
            for start in range(0, first + rows, KEY_TILE):
                cols = min(KEY_TILE, first + rows - start)
                ks = k[b, start:, g].ctypes.data
                kt = turned[0].ctypes.data + start * item
                vt = turned[1].ctypes.data + start * item
                dks, dvs = dk[b, start:, g].ctypes.data, dv[b, start:, g].ctypes.data
                dqs = dq[b, first:, head].ctypes.data
                # Scores and the gradient of probabilities
                gemm(product, False, False, rows, cols, h, scale, qs, ldq, kt, s,
                     zero, ps, cols)  # fmt: skip
                gemm(product, False, False, rows, cols, h, one, dos, lddo, vt, s,
                     zero, dss, cols)  # fmt: skip
                _score_gradients(p, ds, cols, do[b, :, head], o[b, :, head],
                                 lse[b, head], first, start, scale, rows)  # fmt: skip
                gemm(product, True, False, cols, h, rows, one, ps, cols, dos, lddo,
                     begun, dvs, lddv)  # fmt: skip
                gemm(product, True, False, cols, h, rows, one, dss, cols, qs, ldq,
                     begun, dks, lddk)  # fmt: skip
                gemm(product, False, False, rows, h, cols, one, dss, cols, ks, ldk,
                     zero if start == 0 else one, dqs, lddq)  # fmt: skip
