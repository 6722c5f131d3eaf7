"""Draws the next token from logits."""

import numpy as np

from mpipar.ops.philox import stream_key, uniform_rows


def draw(
    logits: np.ndarray, *, temperature: float, top_k: int, seed: int, position: int
) -> int:
    """One token id; a function of its arguments alone, so all ranks draw the same.

    logits       (v,)
    temperature  0 takes the largest logit, the lowest id among equals
    top_k        keeps the k largest logits; 0 or at least v keeps all
    position     of the token drawn, selects the random number
    """
    if temperature == 0 or top_k == 1:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) - logits.max()
    if 0 < top_k < scaled.size:
        kept = np.argsort(-scaled, kind="stable")[:top_k]
        mask = np.full(scaled.shape, -np.inf)
        mask[kept] = scaled[kept]
        scaled = mask
    # Divide last: with the maximum at 0 a tiny temperature only drives others to 0.
    with np.errstate(over="ignore"):
        weights = np.exp(scaled / temperature)
    edges = np.cumsum(weights)
    u = float(uniform_rows(1, (position, 0, 0), stream_key(seed, "generate"))[0])
    return int(
        np.searchsorted(edges, u * edges[-1], side="right").clip(0, edges.size - 1)
    )
