"""What a rank holds of a model: embedding, blocks, head, or some of them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpipar.layers.base import Chain, Layer, Step
from mpipar.layers.cost import Cost
from mpipar.layers.embedding import Embedding
from mpipar.layers.head import Head
from mpipar.layers.parameter import Parameter
from mpipar.layers.stream import Stream

Array = Any


class UnitHooks:
    """Whoever must know when units run: all do nothing here."""

    def action_begins(self, number: int) -> None:
        """Units are about to work on a micro-batch; negative numbers are those of the
        batch before."""

    def action_ended(self, number: int) -> None:
        """Units have worked on a micro-batch."""

    def forward_begins(self, index: int) -> None:
        """Unit `index` is about to run forward."""

    def forward_ended(self, index: int) -> None:
        """Unit `index` has run forward."""

    def backward_begins(self, index: int) -> None:
        """Unit `index` is about to make its input gradient."""

    def backward_ended(self, index: int) -> None:
        """Unit `index` has made its input gradient."""

    def weight_begins(self, index: int) -> None:
        """Unit `index` is about to add to its weight gradients."""

    def weight_ended(self, index: int, *, last: bool) -> None:
        """Unit `index` has added to its weight gradients, for the last time in this
        step or not."""


class Chunk(NamedTuple):
    """A stretch of a model: some blocks, with the embedding before or the head after.

    blocks   global numbers
    """

    blocks: range
    first: bool = True
    last: bool = True


class Groups(NamedTuple):
    """Parameters that are laid out, gathered and reduced together.

    parameters   of each group
    uses         groups that each unit of the model reads
    ends         groups that embedding or head read
    """

    parameters: list[list[Parameter]]
    uses: list[list[int]]
    ends: list[int]


class Model:
    """Units in the order of the forward pass; the last one returns the loss.

    A unit is what a schedule runs, and where a gradient bucket may end.

    rows     the layers of each chunk
    stream   how the residual stream lies on tp;  width  of it
    units    of all chunks, one after another;  chunks  which of them each has
    embedding, head   None where another rank has them
    """

    def __init__(
        self, rows: Sequence[Sequence[Layer]], stream: Stream, width: int
    ) -> None:
        self.stream, self.width = stream, width
        self.rows = [list(row) for row in rows]
        layers = [layer for row in self.rows for layer in row]
        self.embedding = _only(Embedding, layers)
        self.head = _only(Head, layers)
        self.blocks = [layer for layer in layers if not _ends(layer)]
        self.units: list[Layer] = []
        self.chunks: list[range] = []
        self.join_blocks(1)

    def join_blocks(self, count: int) -> None:
        """Makes so many neighbouring blocks of a chunk one unit; the last one may have
        fewer."""
        self.units, self.chunks = [], []
        for row in self.rows:
            start = len(self.units)
            before = [x for x in row if isinstance(x, Embedding)]
            after = [x for x in row if isinstance(x, Head)]
            blocks = row[len(before) : len(row) - len(after)]
            groups = [blocks[i : i + count] for i in range(0, len(blocks), count)]
            joined = [g[0] if len(g) == 1 else Chain(g) for g in groups]
            self.units += [*before, *joined, *after]
            self.chunks.append(range(start, len(self.units)))

    def groups(self, axis: str = "") -> Groups:
        """A group for each unit's own parameters, and one for each tied weight.

        A weight that two units have belongs to the first.

        axis   only parameters whose gradients are summed over it; "" = all
        """
        found: list[list[Parameter]] = []
        home: dict[int, int] = {}
        uses, ends = [], set()
        for unit in self.units:
            parameters = [p for p in unit.parameters() if axis in ("", p.axis)]
            fresh = [p for p in parameters if id(p) not in home]
            alone = [[p] for p in fresh if p.tied]
            for group in [*alone, [p for p in fresh if not p.tied]]:
                home |= {id(p): len(found) for p in group}
                if group:
                    found.append(group)
            uses.append(sorted({home[id(p)] for p in parameters}))
            if _ends(unit):
                ends |= set(uses[-1])
        return Groups(found, uses, sorted(ends))

    def block_units(self) -> list[int]:
        """Which units consist of blocks."""
        return [i for i, unit in enumerate(self.units) if not _ends(unit)]

    def stream_shape(self, batch: int, sequence: int) -> tuple[int, int, int]:
        """Shape of a micro-batch in the residual stream of this rank."""
        positions = self.stream.tokens(1, sequence)
        return batch, positions, self.width

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter once, in memory order."""
        for group in self.groups().parameters:
            yield from group

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


def _ends(layer: Layer) -> bool:
    return isinstance(layer, (Embedding, Head))


def _only(kind: type, layers: Sequence[Layer]) -> Any:
    return next((layer for layer in layers if isinstance(layer, kind)), None)
