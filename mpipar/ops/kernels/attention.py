"""Attention over spans of keys: scores of a few rows at a time, kept in the cache.

Shapes as in `mpipar.ops.attention`: q, o, do (b, s, n, h); k, v (b, t, g, h); spans
(3, b or 1, s). Work is cut into pairs of a sequence and a key/value head, lo .. hi of
the b·g there are. Each tile of scores is a product by BLAS, then one pass over it.
Tiles that no query of theirs sees are left out.

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
_HEADS = "T[:, :, :, :]"


@part
def _reach(seen):
    """The keys that a tile of rows sees: from the first to behind the last."""
    lo, hi = 1 << 60, 0
    for i in range(seen.shape[1]):
        if seen[0, i] < seen[1, i]:
            lo, hi = min(lo, seen[0, i]), max(hi, seen[1, i])
    return min(lo, hi), hi


@part
def _softmax_rows(scores, cols, sums, seen, start):
    """Rows of scores ← exp(score − peak), zero outside of spans; merges sums.

    sums (rows, h + 2)   each row's Σ p v so far, peak, and mass, 0 as long as it has
                         seen no key
    start                key of the first column
    """
    h = sums.shape[1] - 2
    zero = real(0.0, scores[0])
    for i in range(seen.shape[1]):
        row = scores[i * cols : (i + 1) * cols]
        first, last = max(0, seen[0, i] - start), min(cols, seen[1, i] - start)
        if first >= last:
            row[:] = zero
            continue
        mass = sums[i, h + 1]
        fresh = mass == zero
        top = row[first] if fresh else sums[i, h]
        for j in range(first, last):
            top = larger(top, row[j])
        if not fresh:
            shrink = exp(sums[i, h] - top)
            mass *= shrink
            for j in range(h):
                sums[i, j] *= shrink
        for j in range(first):
            row[j] = zero
        for j in range(first, last):
            e = exp(row[j] - top)
            row[j] = e
            mass += e
        for j in range(last, cols):
            row[j] = zero
        sums[i, h], sums[i, h + 1] = top, mass


@kernel(
    f"(i8, {_HEADS}, {_HEADS}, {_HEADS}, G[:, :, :, ::1], T[:, :, ::1], T, "
    "i8[:, :, ::1], T[::1], T[:, ::1], T[::1], i8, i8)"
)
def attention(product, q, k, v, o, lse, scale, spans, scores, sums, turned, lo, hi):
    """o = softmax(scale · q kᵀ + mask) v and the log-sum-exp; 0 and −inf for a query
    that sees no key.

    o         of the operand type; of the compute type where it is to be merged
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
        g, r = head // shared, b % spans.shape[1]
        # A few queries, as in generation, do not pay for turning the keys.
        turns = s >= QUERY_TILE
        if turns and head % shared == 0:
            turn(k[b, :, g], turned, k.shape[1])
        for first in range(0, s, QUERY_TILE):
            rows = min(QUERY_TILE, s - first)
            seen = spans[:, r, first : first + rows]
            begin, end = _reach(seen)
            sums[:rows, h + 1] = zero
            if begin == end:
                sums[:rows, :h] = zero
            for start in range(begin, end, KEY_TILE):
                cols = min(KEY_TILE, end - start)
                ks, ld = k[b, start:, g].ctypes.data, ldk
                if turns:
                    ks, ld = turned.ctypes.data + start * item, t
                gemm(
                    product, False, not turns, rows, cols, h, scale,
                    q[b, first:, head].ctypes.data, ldq, ks, ld, zero,
                    scores.ctypes.data, cols,
                )  # fmt: skip
                _softmax_rows(scores, cols, sums, seen, start)
                gemm(
                    product, False, False, rows, h, cols, one,
                    scores.ctypes.data, cols, v[b, start:, g].ctypes.data, ldv,
                    zero if start == begin else one, sums.ctypes.data, h + 2,
                )  # fmt: skip
            for i in range(rows):
                mass = sums[i, h + 1]
                share = one / mass if mass > zero else zero
                lse[b, head, first + i] = sums[i, h] + math.log(mass)
                if mass == zero:
                    lse[b, head, first + i] = -math.inf
                for j in range(h):
                    like = o[b, first + i, head, j]
                    o[b, first + i, head, j] = narrow(sums[i, j] * share, like)


@part
def _score_gradients(p, ds, cols, do, o, lse, seen, first, start, scale):
    """p ← exp(p − lse), ds ← scale · p∘(ds − Σ do·o); zero outside of spans."""
    zero = real(0.0, scale)
    for i in range(seen.shape[1]):
        at = first + i
        lo, hi = max(0, seen[0, i] - start), min(cols, seen[1, i] - start)
        pr, dr = p[i * cols : (i + 1) * cols], ds[i * cols : (i + 1) * cols]
        if lo >= hi:
            pr[:] = zero
            dr[:] = zero
            continue
        delta = zero
        for j in range(do.shape[1]):
            delta += do[at, j] * widen(o[at, j], zero)
        level = lse[at]
        for j in range(lo):
            pr[j] = zero
            dr[j] = zero
        for j in range(lo, hi):
            e = exp(pr[j] - level)
            pr[j] = e
            dr[j] = e * (dr[j] - delta) * scale
        for j in range(hi, cols):
            pr[j] = zero
            dr[j] = zero
        if seen[2, i] == 1:
            # The softmax of a query that sees one key is constant.
            dr[lo] = zero


@kernel(
    f"(i8, T[:, :, :, ::1], {_HEADS}, {_HEADS}, {_HEADS}, O[:, :, :, ::1], "
    f"T[:, :, ::1], {_HEADS}, {_HEADS}, {_HEADS}, T, i8[:, :, ::1], T[:, ::1], "
    "T[:, ::1], i8, i8)"
)
def attention_back(
    product, do, q, k, v, o, lse, dq, dk, dv, scale, spans, scratch, turned, lo, hi
):
    """dv += Pᵀ do; dS = P∘(do vᵀ − D), D = Σ do·o; dq += scale·dS k; dk += scale·dSᵀ q.

    scratch (2, QUERY_TILE·KEY_TILE), turned (2, t·h)
    """
    s, t, h, groups = q.shape[1], k.shape[1], q.shape[3], k.shape[2]
    shared = q.shape[2] // groups
    one, zero = real(1.0, scale), real(0.0, scale)
    item = q.itemsize
    ldq, ldk = q.strides[1] // item, k.strides[1] // item
    lddo, lddq = do.strides[1] // item, dq.strides[1] // item
    lddk, lddv = dk.strides[1] // item, dv.strides[1] // item
    p, ds = scratch[0], scratch[1]
    ps, dss = p.ctypes.data, ds.ctypes.data
    for task in range(lo * shared, hi * shared):
        b, head = task // (groups * shared), task % (groups * shared)
        g, r = head // shared, b % spans.shape[1]
        if head % shared == 0:
            turn(k[b, :, g], turned[0], k.shape[1])
            turn(v[b, :, g], turned[1], v.shape[1])
        for first in range(0, s, QUERY_TILE):
            rows = min(QUERY_TILE, s - first)
            seen = spans[:, r, first : first + rows]
            begin, end = _reach(seen)
            qs, dos = q[b, first:, head].ctypes.data, do[b, first:, head].ctypes.data
            dqs = dq[b, first:, head].ctypes.data
            for start in range(begin, end, KEY_TILE):
                cols = min(KEY_TILE, end - start)
                ks = k[b, start:, g].ctypes.data
                kt = turned[0].ctypes.data + start * item
                vt = turned[1].ctypes.data + start * item
                dks, dvs = dk[b, start:, g].ctypes.data, dv[b, start:, g].ctypes.data
                # Scores and the gradient of probabilities
                gemm(product, False, False, rows, cols, h, scale, qs, ldq, kt, t,
                     zero, ps, cols)  # fmt: skip
                gemm(product, False, False, rows, cols, h, one, dos, lddo, vt, t,
                     zero, dss, cols)  # fmt: skip
                _score_gradients(p, ds, cols, do[b, :, head], o[b, :, head],
                                 lse[b, head], seen, first, start, scale)  # fmt: skip
                gemm(product, True, False, cols, h, rows, one, ps, cols, dos, lddo,
                     one, dvs, lddv)  # fmt: skip
                gemm(product, True, False, cols, h, rows, one, dss, cols, qs, ldq,
                     one, dks, lddk)  # fmt: skip
                gemm(product, False, False, rows, h, cols, one, dss, cols, ks, ldk,
                     one, dqs, lddq)  # fmt: skip


@kernel("(T[:, :, :, ::1], T[:, :, ::1], T[:, :, :, ::1], T[:, :, ::1], i8, i8)")
def merge(o, lse, part, level, lo, hi):
    """o, lse ← softmax over the keys of both; part, level are those of other keys.

    Rows lo .. hi of the b·s there are. A query that saw no key has level −inf.
    """
    zero = real(0.0, o[0, 0, 0, 0])
    one = real(1.0, zero)
    s = o.shape[1]
    for row in range(lo, hi):
        b, i = row // s, row % s
        for head in range(o.shape[2]):
            mine, other = lse[b, head, i], level[b, head, i]
            if other == -math.inf:
                continue
            if mine == -math.inf:
                lse[b, head, i] = other
                o[b, i, head] = part[b, i, head]
                continue
            top = larger(mine, other)
            w, u = exp(mine - top), exp(other - top)
            share = one / (w + u)
            w, u = w * share, u * share
            lse[b, head, i] = top - math.log(share)
            for j in range(o.shape[3]):
                o[b, i, head, j] = w * o[b, i, head, j] + u * part[b, i, head, j]
