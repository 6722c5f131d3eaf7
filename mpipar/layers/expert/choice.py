"""Which experts tokens take: pure functions of scores, on the host."""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np


def choose(
    scores: np.ndarray, count: int, *, groups: int = 1, active_groups: int = 0
) -> np.ndarray:
    """The `count` experts with the largest scores, best first; of equal ones the first.

    With groups, only those of the `active_groups` best ones, which are told by the sum
    of their two largest scores.

    scores (t, e)  →  (t, count)
    Source   DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, for groups
    """
    tokens, experts = scores.shape
    if 0 < active_groups < groups:
        by_group = scores.reshape(tokens, groups, experts // groups)
        best = -np.sort(-by_group, axis=2)[:, :, :2].sum(axis=2)
        chosen = choose(best, active_groups)
        is_open = np.zeros((tokens, groups), bool)
        np.put_along_axis(is_open, chosen, True, axis=1)
        scores = np.where(is_open[:, :, None], by_group, -np.inf).reshape(scores.shape)
    return np.argsort(-scores, axis=1, kind="stable")[:, :count].copy()


class Spread(NamedTuple):
    """How the tokens of each sequence spread over experts.

    kept     (b, s, k) True for choices that an expert takes, of this rank's positions
    shares   (b, e) part of all choices of a sequence that fell on each expert
    """

    kept: np.ndarray
    shares: np.ndarray


def spread(
    chosen: np.ndarray,
    positions: np.ndarray,
    experts: int,
    length: int,
    capacity: float,
    axes: Sequence[Any],
) -> Spread:
    """Counts the choices of whole sequences, the same whoever holds which positions.

    An expert takes ⌈capacity · k · length / experts⌉ tokens of a sequence, the first
    ones by position. Positions from `length` on are padding: nothing takes or counts
    them. Ranks of `axes` hold other positions of the same sequences: 4·s·(b·k + 1)
    bytes from each.

    chosen (b, s, k);  positions (s,)
    Source   Lepikhin et al. 2020 (GShard), section 2.2: local groups, here a sequence
    """
    b, s, k = chosen.shape
    rows = chosen.transpose(0, 2, 1).reshape(b * k, s)
    table, place = np.concatenate([positions[None], rows]).astype(np.int32)[None], 0
    for axis in axes:
        place += axis.rank * len(table)
        table = axis.all_gather(table)
    every = table[:, 0].reshape(-1)
    whole = table[:, 1:].reshape(-1, b, k, s).transpose(1, 0, 3, 2).reshape(b, -1, k)
    counts_at = every < length
    numbers = whole + (np.arange(b) * experts)[:, None, None]
    loads = np.bincount(numbers[:, counts_at].reshape(-1), minlength=b * experts)
    kept = np.repeat(counts_at[None, :, None], b, axis=0) & np.ones((1, 1, k), bool)
    if capacity:
        most = ceil(capacity * k * length / experts)
        order = np.argsort(every, kind="stable")
        kept[:, order] &= _arrivals(numbers[:, order]) < most
    own = slice(place * s, (place + 1) * s)
    return Spread(kept[:, own], loads.reshape(b, experts) / (k * length))


def _arrivals(numbers: np.ndarray) -> np.ndarray:
    """How many equal numbers come before each, in memory order."""
    flat = numbers.reshape(-1)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    starts = np.searchsorted(ordered, ordered)
    found = np.empty_like(order)
    found[order] = np.arange(flat.size) - starts
    return found.reshape(numbers.shape)
