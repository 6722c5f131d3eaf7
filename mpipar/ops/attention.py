"""Attention by tiles with online softmax: no (s, s) array ever exists.

Each query sees a span of keys (`ops.spans`). Tiles that no query sees are skipped,
forward and backward. The softmax is merged
over key tiles as in Milakov & Gimelshein 2018 and Dao et al. 2022 (algorithm 1); the
backward pass rebuilds each probability tile from the saved log-sum-exp.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.ops.spans import reach

Array = Any

QUERY_TILE = 128
KEY_TILE = 512
# Bytes of scores worked on at a time, so that a few such arrays stay in the L2 cache.
TILE_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Draws:
    """Which probabilities are dropped: element (sequence, head, query, key) is element
    (r, key position) of `Ops.dropout_scale` with the head's stream and the row counter
    (query position, sample, step).

    streams   the two key words of each query head (`philox.stream_key`)
    samples   (b,) sample numbers, on the device;  number  of the step
    queries, keys   positions, on the host
    ops       whose `dropout_scale` draws them
    """

    rate: float
    streams: tuple[tuple[int, int], ...]
    samples: Array
    number: int
    queries: np.ndarray
    keys: np.ndarray
    ops: Any

    def __call__(self, sequences: slice, heads: slice, rows: slice, cols: slice) -> Any:
        """Factors of a tile.   →  (sequences, heads, rows, cols)"""
        sample = self.samples[sequences][:, None]
        where = self.ops.asarray(self.queries[rows])[None, :], sample, self.number
        # Drawn for all positions from the first key to the last
        seen = self.keys[cols]
        start, width = int(seen[0]), int(seen[-1] - seen[0]) + 1
        draw, seen = self.ops.dropout_scale, seen - start
        factors = [
            draw(self.rate, width, where, stream, start=start)[..., seen]
            for stream in self.streams[heads]
        ]
        return self.ops.xp.stack(factors, axis=1)


class AttentionOps:
    """The attention operations of `Ops`, which gives them xp, dtype and 16-bit arrays.

    Shapes   q, o (b, s, n, h);  k, v (b, t, g, h), g divides n;  lse (b, n, s);
             spans (3, b or 1, s) as in `ops.spans`
    """

    xp: Any
    dtype: np.dtype
    wide: Callable[[Array], Array]
    zeros: Callable[[tuple[int, ...]], Array]
    operand: Callable[[Array], Array]

    def attention_fwd(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        spans: np.ndarray,
        dropout: Draws | None = None,
        part: bool = False,
    ) -> tuple[Array, Array]:
        """o = softmax(scale · q kᵀ + mask) v, and its log-sum-exp; 0 and −inf for a
        query that sees no key.

        part   o is of the compute type, to be merged with that of other keys
        """
        xp = self.xp
        b, s, n, _ = q.shape
        o = xp.empty(q.shape, self.dtype)
        lse = xp.empty((b, n, s), self.dtype)
        queries, out = _by_group(q, k.shape[2]), _by_group(o, k.shape[2])
        keys, values = _by_group(k, k.shape[2]), _by_group(v, k.shape[2])
        stats = lse.reshape(*queries.shape[:4])
        for block in self._blocks(queries, keys):
            for rows in _tiles(0, s, QUERY_TILE):
                qt = queries[block][..., rows, :] * self.dtype.type(scale)
                shape = (*qt.shape[:-1], 1)
                peak, total = xp.full(shape, -xp.inf, self.dtype), self.zeros(shape)
                acc = xp.zeros_like(qt)
                for cols in _tiles(*reach(spans, rows), KEY_TILE):
                    p = self._scores(qt, keys[block][..., cols, :], "p")
                    self._mask(p, spans, block[0], rows, cols)
                    top = xp.maximum(peak, p.max(axis=-1, keepdims=True))
                    # A query that has seen no key so far: exp(−inf − 0) = 0
                    level = xp.where(top == -xp.inf, self.dtype.type(0), top)
                    p -= level
                    xp.exp(p, out=p)
                    mass = self.row_sum(p)
                    if dropout is not None:
                        p *= _dropout_tile(dropout, block, queries, rows, cols)
                    shrink = xp.exp(peak - level)
                    acc = acc * shrink + xp.matmul(p, values[block][..., cols, :])
                    total = total * shrink + mass
                    peak = top
                some = total > 0
                acc /= xp.where(some, total, self.dtype.type(1))
                out[block][..., rows, :] = acc
                total = xp.log(xp.where(some, total, self.dtype.type(1)))
                stats[block][..., rows] = (peak + total)[..., 0]
        return o if part else self.operand(o), lse

    def attention_merge(self, o: Array, lse: Array, part: Array, level: Array) -> None:
        """o, lse ← attention over the keys of both; part, level are those of others.

        Where neither saw a key, o stays 0 and lse −inf.
        """
        xp = self.xp
        top = xp.maximum(lse, level)
        top[top == -xp.inf] = 0.0
        mine, other = xp.exp(lse - top), xp.exp(level - top)
        total = mine + other
        share = 1 / xp.where(total > 0, total, self.dtype.type(1))
        o *= (mine * share).swapaxes(1, 2)[..., None]
        o += part * (other * share).swapaxes(1, 2)[..., None]
        with np.errstate(divide="ignore"):
            lse[...] = top + xp.log(total)

    def attention_bwd(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        *,
        dq: Array,
        dk: Array,
        dv: Array,
        scale: float,
        spans: np.ndarray,
        dropout: Draws | None = None,
    ) -> None:
        """Adds to dq, dk, dv the gradients of o = softmax(scale · q kᵀ + mask) v.

        D = Σ_h do·o;  P = exp(scale · q kᵀ − lse);  dv = Pᵀ do;  dS = P∘(do vᵀ − D);
        dq = scale · dS k;  dk = scale · dSᵀ q.   With dropout factors m: dv = (m∘P)ᵀ do
        and dS = P∘(m∘(do vᵀ) − D).

        o, lse   over all keys that a query sees, also those that are not in k and v
        """
        xp, g = self.xp, k.shape[2]
        queries, outputs, douts = (_by_group(x, g) for x in (q, self.wide(o), do))
        keys, values, dqs, dks, dvs = (_by_group(x, g) for x in (k, v, dq, dk, dv))
        stats = lse.reshape(*queries.shape[:4])[..., None]
        for block in self._blocks(queries, keys):
            for rows in _tiles(0, q.shape[1], QUERY_TILE):
                qt = queries[block][..., rows, :] * self.dtype.type(scale)
                dot = xp.ascontiguousarray(douts[block][..., rows, :])
                delta = self.row_sum(dot * outputs[block][..., rows, :])
                dqt = xp.zeros_like(qt)
                for cols in _tiles(*reach(spans, rows), KEY_TILE):
                    p = self._scores(qt, keys[block][..., cols, :], "p")
                    self._mask(p, spans, block[0], rows, cols)
                    # A query that sees no key at all has level −inf, and p = 0.
                    level = stats[block][..., rows, :]
                    p -= xp.where(level == -xp.inf, self.dtype.type(0), level)
                    xp.exp(p, out=p)
                    ds = self._scores(dot, values[block][..., cols, :], "ds")
                    kept = p
                    if dropout is not None:
                        factor = _dropout_tile(dropout, block, queries, rows, cols)
                        ds *= factor
                        kept = p * factor
                    ds -= delta
                    ds *= p
                    # The softmax of a query that sees one key is constant.
                    alone = self._of(spans[2] == 1, block[0], rows)
                    ds[xp.broadcast_to(alone[..., None], ds.shape)] = 0.0
                    dqt += xp.matmul(ds, keys[block][..., cols, :])
                    dks[block][..., cols, :] += _over_group(ds, qt, xp)
                    dvs[block][..., cols, :] += _over_group(kept, dot, xp)
                dqt *= self.dtype.type(scale)
                dqs[block][..., rows, :] += dqt

    def attention_flops(self, pairs: int, width: int) -> int:
        """Multiply-adds × 2 of scores and values of one head, for so many pairs of a
        query and a key that it sees."""
        return 4 * pairs * width

    def row_sum(self, x: Array) -> Array:
        """Sum over the last dim, kept as a dim of size 1."""
        return x.sum(axis=-1, keepdims=True)

    def scratch(self, name: str, shape: tuple[int, ...]) -> Array:
        """An uninitialised array that the next call with this name overwrites."""
        pool = self.__dict__.setdefault("_scratch", {})
        size = math.prod(shape)
        if name not in pool or pool[name].size < size:
            pool[name] = self.xp.empty(size, self.dtype)
        return pool[name][:size].reshape(shape)

    def _scores(self, rows: Array, cols: Array, name: str) -> Array:
        """rows colsᵀ, for each head of the block.   →  (b, g, r, queries, keys)"""
        shape = (*rows.shape[:4], cols.shape[3])
        out = self.scratch(name, shape)
        return self.xp.matmul(rows, cols.swapaxes(-1, -2), out=out)

    def _mask(
        self, p: Array, spans: np.ndarray, sequences: slice, rows: slice, cols: slice
    ) -> None:
        """−inf where a key is outside of its query's span."""
        xp = self.xp
        begin, end, _ = (self._of(x, sequences, rows)[..., None] for x in spans)
        keys = xp.arange(cols.start, cols.start + p.shape[-1])
        xp.copyto(p, self.dtype.type(-xp.inf), where=(keys < begin) | (keys >= end))

    def _of(self, x: np.ndarray, sequences: slice, rows: slice) -> Array:
        """(b or 1, s) numbers of queries for scores.   →  (b or 1, 1, 1, rows)"""
        own = x[:, rows] if len(x) == 1 else x[sequences, rows]
        return self.xp.asarray(own)[:, None, None]

    def _blocks(self, queries: Array, keys: Array) -> Iterator[tuple[slice, slice]]:
        """Blocks of (sequences, key/value heads) with scores within TILE_BYTES."""
        b, g, r, s, _ = queries.shape
        tile = (
            r * min(s, QUERY_TILE) * min(keys.shape[3], KEY_TILE) * self.dtype.itemsize
        )
        room = max(1, TILE_BYTES // max(1, tile))
        for heads in _tiles(0, g, room):
            for sequences in _tiles(0, b, max(1, room // g)):
                yield sequences, heads


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    """[start, stop) in slices of at most `size`."""
    for lo in range(start, stop, size):
        yield slice(lo, min(lo + size, stop))


def _by_group(x: Array, groups: int) -> Array:
    """A view (b, g, n/g, s, h) of x (b, s, n, h): query heads by key/value head."""
    b, s, n, h = x.shape
    return x.reshape(b, s, groups, n // groups, h).transpose(0, 2, 3, 1, 4)


def _over_group(weights: Array, rows: Array, xp: Any) -> Array:
    """weightsᵀ rows, summed over the query heads that share a key/value head."""
    product = xp.matmul(weights.swapaxes(-1, -2), rows)
    return product if product.shape[2] == 1 else product.sum(axis=2, keepdims=True)


def _dropout_tile(
    dropout: Draws,
    block: tuple[slice, slice],
    queries: Array,
    rows: slice,
    cols: slice,
) -> Array:
    """Dropout factors of a tile, shaped like its scores."""
    sequences, heads = block
    g, r = queries.shape[1], queries.shape[2]
    last = min(heads.stop, g)
    factor = dropout(sequences, slice(heads.start * r, last * r), rows, cols)
    return factor.reshape(factor.shape[0], last - heads.start, r, *factor.shape[2:])
