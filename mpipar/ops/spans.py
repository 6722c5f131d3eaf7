"""Which keys each query sees: a span of them, whatever the mask.

Keys lie in ascending positions, and a query at position p sees the positions from some
first one to p. So a causal mask, a window, packed documents and any cut of a sequence
over ranks are the same thing: two indices for each query.

Spans are int64 arrays (3, b or 1, s) on the host:
    [0], [1]   query i sees keys [0, i] … [1, i] − 1 of the array at hand
    [2]        how many keys it sees in all, also in arrays that other ranks hold
"""

import numpy as np


def causal_spans(queries: int, offset: int = 0) -> np.ndarray:
    """Query i sees keys 0 … offset + i.   →  (3, 1, queries)"""
    seen = offset + 1 + np.arange(queries)
    return np.stack([np.zeros_like(seen), seen, seen])[:, None]


def spans_between(
    queries: np.ndarray, firsts: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """A query at position p sees the positions firsts … p.   →  (3, b or 1, s)

    queries   (s,) positions;  keys  (t,) ascending positions
    firsts    (b or 1, s) first position that each query sees
    """
    begin = np.searchsorted(keys, firsts, "left")
    end = np.searchsorted(keys, queries, "right")
    end = np.maximum(np.broadcast_to(end, begin.shape), begin)
    seen = np.broadcast_to(queries, begin.shape) - firsts + 1
    return np.ascontiguousarray(np.stack([begin, end, seen]))


def pairs(spans: np.ndarray) -> int:
    """How many pairs of a query and a key there are, over all sequences."""
    return int((spans[1] - spans[0]).sum())


def reach(spans: np.ndarray, rows: slice) -> tuple[int, int]:
    """The keys that these queries see: from the first to behind the last."""
    begin, end = spans[0, :, rows], spans[1, :, rows]
    some = begin < end
    if not some.any():
        return 0, 0
    return int(begin[some].min()), int(end[some].max())
