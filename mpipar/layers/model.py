"""A model as a row of units: embedding, blocks, head."""

import math
from collections.abc import Iterator
from typing import Any

from mpipar.layers.base import Chain, Layer, Step
from mpipar.layers.cost import Cost
from mpipar.layers.embedding import Embedding
from mpipar.layers.head import Head
from mpipar.layers.parameter import Parameter

Array = Any


class UnitHooks:
    """Whoever must know when units run: all do nothing here."""

    def forward_begins(self, index: int) -> None:
        """Unit `index` is about to run forward."""

    def forward_ended(self, index: int) -> None:
        """Unit `index` has run forward."""

    def backward_begins(self, index: int) -> None:
        """Unit `index` is about to run backward."""

    def backward_ended(self, index: int, *, last: bool) -> None:
        """Unit `index` has run backward; `last` in the step's last micro-batch."""


class Model:
    """Units in the order of the forward pass; the last one returns the loss.

    A unit is what a schedule runs, and where a gradient bucket may end.
    """

    def __init__(self, embedding: Embedding, blocks: list[Layer], head: Head) -> None:
        self.embedding, self.blocks, self.head = embedding, blocks, head
        self.units: list[Layer] = []
        self.join_blocks(1)

    def join_blocks(self, count: int) -> None:
        """Makes so many neighbouring blocks one unit; the last one may have fewer."""
        rows = [self.blocks[i : i + count] for i in range(0, len(self.blocks), count)]
        joined = [row[0] if len(row) == 1 else Chain(row) for row in rows]
        self.units = [self.embedding, *joined, self.head]

    def unit_parameters(self) -> Iterator[list[Parameter]]:
        """Each unit's parameters; a tied weight belongs to the first that has it."""
        seen: set[int] = set()
        for unit in self.units:
            fresh = [p for p in unit.parameters() if id(p) not in seen]
            seen.update(id(p) for p in fresh)
            yield fresh

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter once, in memory order."""
        for unit in self.unit_parameters():
            yield from unit

    @property
    def size(self) -> int:
        """Elements of all parameters, copies and cuts left aside."""
        return sum(math.prod(p.shape) for p in self.parameters())

    def logits(self, ids: Array, step: Step) -> Array:
        """Logits after the last of these ids.   ids (b, s) → (b, v), on all tp ranks"""
        x, _ = self.embedding.forward(ids, step)
        for block in self.blocks:
            x, _ = block.forward(x, step)
        logits = self.head.logits(x, step)
        if step.cache is not None:
            step.cache.advance(ids.shape[1])
        return logits

    def cost(self, batch: int, sequence: int) -> Cost:
        """What one micro-batch costs on this rank."""
        return sum((unit.cost(batch, sequence) for unit in self.units), Cost())
