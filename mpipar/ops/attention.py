"""Causal attention by tiles with online softmax: no (s, s) array ever exists.

Tiles in the future of a query are skipped, forward and backward. The softmax is merged
over key tiles as in Milakov & Gimelshein 2018 and Dao et al. 2022 (algorithm 1); the
backward pass rebuilds each probability tile from the saved log-sum-exp.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = Any

QUERY_TILE = 128
KEY_TILE = 512
# Bytes of scores worked on at a time, so that a few such arrays stay in the L2 cache.
TILE_BYTES = 1 << 18
# Masks kept; a training run needs a few, generation a new one for every position.
MASKS = 16

# (sequences, query heads, queries, keys) as slices -> dropout factors of that tile
DropoutTile = Callable[[slice, slice, slice, slice], Array]


class AttentionOps:
    """The attention operations of `Ops`, which gives them xp, dtype and 16-bit arrays.

    Shapes   q, o (b, s, n, h);  k, v (b, t, g, h), g divides n, t ≥ s;  lse (b, n, s).
             Query i stands at key position offset + i and sees keys 0 .. offset + i.
    """

    xp: Any
    dtype: np.dtype
    wide: Callable[[Array], Array]
    operand: Callable[[Array], Array]

    def attention_fwd(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        offset: int = 0,
        dropout: DropoutTile | None = None,
    ) -> tuple[Array, Array]:
        """o = softmax(scale · q kᵀ + causal mask) v, and its log-sum-exp."""
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
                acc = peak = total = None
                for cols in _tiles(0, offset + rows.stop, KEY_TILE):
                    p = self._scores(qt, keys[block][..., cols, :], "p")
                    self._mask_future(p, offset + rows.start, cols)
                    top = p.max(axis=-1, keepdims=True)
                    top = top if peak is None else xp.maximum(peak, top)
                    p -= top
                    xp.exp(p, out=p)
                    mass = self.row_sum(p)
                    if dropout is not None:
                        p *= _dropout_tile(dropout, block, queries, rows, cols)
                    part = xp.matmul(p, values[block][..., cols, :])
                    if peak is None:
                        acc, total = part, mass
                    else:
                        shrink = xp.exp(peak - top)
                        acc = acc * shrink + part
                        total = total * shrink + mass
                    peak = top
                acc /= total
                out[block][..., rows, :] = acc
                stats[block][..., rows] = (peak + xp.log(total))[..., 0]
        return self.operand(o), lse

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
        dropout: DropoutTile | None = None,
    ) -> None:
        """Writes dq, dk, dv of o = softmax(scale · q kᵀ + mask) v, with s = t.

        D = Σ_h do·o;  P = exp(scale · q kᵀ − lse);  dv = Pᵀ do;  dS = P∘(do vᵀ − D);
        dq = scale · dS k;  dk = scale · dSᵀ q.   With dropout factors m: dv = (m∘P)ᵀ do
        and dS = P∘(m∘(do vᵀ) − D).
        """
        xp, g = self.xp, k.shape[2]
        queries, outputs, douts = (_by_group(x, g) for x in (q, self.wide(o), do))
        keys, values, dqs, dks, dvs = (_by_group(x, g) for x in (k, v, dq, dk, dv))
        stats = lse.reshape(*queries.shape[:4])[..., None]
        dk[...] = 0.0
        dv[...] = 0.0
        for block in self._blocks(queries, keys):
            for rows in _tiles(0, q.shape[1], QUERY_TILE):
                qt = queries[block][..., rows, :] * self.dtype.type(scale)
                dot = xp.ascontiguousarray(douts[block][..., rows, :])
                delta = self.row_sum(dot * outputs[block][..., rows, :])
                dqt = xp.zeros_like(qt)
                for cols in _tiles(0, rows.stop, KEY_TILE):
                    p = self._scores(qt, keys[block][..., cols, :], "p")
                    self._mask_future(p, rows.start, cols)
                    p -= stats[block][..., rows, :]
                    xp.exp(p, out=p)
                    ds = self._scores(dot, values[block][..., cols, :], "ds")
                    kept = p
                    if dropout is not None:
                        factor = _dropout_tile(dropout, block, queries, rows, cols)
                        ds *= factor
                        kept = p * factor
                    ds -= delta
                    ds *= p
                    if rows.start == 0:
                        # Query 0 sees key 0 alone: its softmax is constant.
                        ds[..., 0, :] = 0.0
                    dqt += xp.matmul(ds, keys[block][..., cols, :])
                    dks[block][..., cols, :] += _over_group(ds, qt, xp)
                    dvs[block][..., cols, :] += _over_group(kept, dot, xp)
                dqt *= self.dtype.type(scale)
                dqs[block][..., rows, :] = dqt

    def attention_flops(self, queries: int, width: int) -> int:
        """Multiply-adds × 2 of scores and values over one head's causal half."""
        return 2 * queries * (queries + 1) * width

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

    def _mask_future(self, p: Array, first: int, cols: slice) -> None:
        """−inf where a key lies after its query; query i stands at first + i."""
        lo = max(0, first + 1 - cols.start)
        if lo >= p.shape[-1]:
            return
        p[..., lo:] += self._future(
            p.shape[-2], p.shape[-1] - lo, cols.start + lo - first
        )

    def _future(self, queries: int, keys: int, ahead: int) -> Array:
        """−inf where ahead + j > i, else 0; kept for later.   (queries, keys)"""
        masks = self.__dict__.setdefault("_masks", {})
        if (queries, keys, ahead) not in masks:
            xp = self.xp
            later = ahead + xp.arange(keys) > xp.arange(queries)[:, None]
            if len(masks) == MASKS:
                masks.clear()
            mask = xp.where(later, -xp.inf, 0.0).astype(self.dtype)
            masks[queries, keys, ahead] = mask
        return masks[queries, keys, ahead]

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
    dropout: DropoutTile,
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
