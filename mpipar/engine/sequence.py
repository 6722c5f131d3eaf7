"""How each sequence of a batch lies on this rank."""

from typing import Any

import numpy as np

from mpipar.config import Recipe, head_ranks
from mpipar.data import IGNORE, Batch
from mpipar.layers.context import Core, Cut, make_core
from mpipar.ops import Ops


class OwnSequence:
    """The part of every sequence that this rank holds, and how it attends.

    Tokens, labels and documents are told from the whole sequence, before it is cut.
    Where its length cannot be cut evenly, tokens without labels are added at the end:
    nothing that counts sees them.

    length      with what is added;  own  positions that this rank holds, ascending
    positions   the same on the device
    core        attention over the cut
    """

    def __init__(self, recipe: Recipe, grid: Any, ops: Ops) -> None:
        model, parallel = recipe.model, recipe.parallel
        self.end = recipe.data.end_token
        self.separates = recipe.data.documents == "separate"
        self.context, self.is_learned = model.context, model.family == "gpt"
        cp, tensor = grid.cp, parallel.tensor
        heads = head_ranks(
            parallel.context_method,
            cp.size,
            parallel.ulysses,
            model.heads // tensor,
            max(1, model.kv_heads // tensor),
        )
        self.cut = Cut(parallel.context_method, cp.size, heads)
        self.core: Core = make_core(ops, self.cut, grid)
        # Where tensor ranks have tokens of their own, in the stream or for experts
        apart = recipe.experts.count and parallel.expert_tensor < tensor
        multiple = self.cut.multiple * (tensor if parallel.sequence or apart else 1)
        if cp.size == 1:
            multiple = 1
        self.length = -(-model.context // multiple) * multiple
        self.own = self.cut.of_rank(self.length, cp.rank)
        self.positions = ops.asarray(self.own)

    def tokens(self, batch: Batch) -> np.ndarray:
        """Ids of the own positions.   →  (b, s)"""
        return self._padded(batch.tokens, 0)[:, self.own]

    def labels(self, batch: Batch) -> np.ndarray:
        """Their labels.   →  (b, s)"""
        return self._padded(batch.labels, IGNORE)[:, self.own]

    def firsts(self, batch: Batch) -> np.ndarray | None:
        """First position of each token's document.   →  (b, length), or None = 0"""
        if not self.separates:
            return None
        tokens = self._padded(batch.tokens, 0)
        begins = np.zeros(tokens.shape, np.int64)
        places = np.arange(1, self.length)
        begins[:, 1:] = np.where(tokens[:, :-1] == self.end, places, 0)
        return np.maximum.accumulate(begins, axis=1)

    def places(self, firsts: np.ndarray | None) -> np.ndarray | None:
        """Places of the own tokens among learned positions, where they are not just
        their positions.   →  (b or 1, s), or None"""
        if not self.is_learned or (firsts is None and self.length == self.context):
            return None
        places = self.own[None]
        if firsts is not None:
            places = places - firsts[:, self.own]
        return np.minimum(places, self.context - 1)

    def _padded(self, x: np.ndarray, value: int) -> np.ndarray:
        missing = self.length - x.shape[1]
        if missing <= 0:
            return x
        return np.pad(x, ((0, 0), (0, missing)), constant_values=value)
