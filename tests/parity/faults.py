"""Faults to plant in a layout: what a comparison with the serial run must notice.

Each takes a pytest MonkeyPatch and changes classes of the library, on all ranks alike.
"""

from typing import Any

import numpy as np
import pytest

from mpipar.config import replace
from mpipar.engine import Engine
from mpipar.layers.embedding import Embedding
from mpipar.layers.rope import Rope
from mpipar.layers.stream import Stream
from mpipar.layers.tensor.one_d import RowLinear
from mpipar.zero.flat import FlatState, Piece
from mpipar.zero.gradients import BucketedGradients, Partials


def drop_forward_sum(patch: pytest.MonkeyPatch) -> None:
    """The outputs of the MLP in block 1 stay summands."""
    whole = RowLinear.forward

    def forward(self: RowLinear, x: Any, step: Any, onto: Any = None) -> Any:
        if self.weight.name != "blocks.1.mlp.down.weight":
            return whole(self, x, step, onto)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.stream.tp, "all_reduce", lambda y: y)
            return whole(self, x, step, onto)

    patch.setattr(RowLinear, "forward", forward)


def drop_backward_sum(patch: pytest.MonkeyPatch) -> None:
    """Input gradients of all column-cut layers stay summands."""
    patch.setattr(Stream, "leave_backward", lambda self, dx: dx)


def skip_replicas(patch: pytest.MonkeyPatch) -> None:
    """Gradients that are summands over tp or kv are not summed."""
    patch.setattr(Partials, "sum", lambda self, parameters: None)


def average_over_data(patch: pytest.MonkeyPatch) -> None:
    """Gradients are means over dp."""
    finish = BucketedGradients.finish

    def mean(self: BucketedGradients) -> None:
        finish(self)
        self.flat.grad /= self.axis.size

    patch.setattr(BucketedGradients, "finish", mean)


def add_bias_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """The bias of row-cut layers is added before the sum."""

    def forward(self: RowLinear, x: Any, step: Any, onto: Any = None) -> Any:
        y = self.ops.linear_fwd(x, self.weight.data, self.bias.data)
        _, saved = whole(self, x, step)
        return self.ops.add_residual(self.stream.enter(y), None, onto), saved

    whole = RowLinear.forward
    patch.setattr(RowLinear, "forward", forward)


def count_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """Every tp rank counts the replicated tensors in the norm."""
    bind = FlatState.__init__

    def own_all(self: FlatState, *args: Any, **options: Any) -> None:
        bind(self, *args, **options)
        for p in self.parameters:
            p.owner = True

    patch.setattr(FlatState, "__init__", own_all)


def count_data_ranks(patch: pytest.MonkeyPatch) -> None:
    """Every dp rank counts all of its gradient in the norm."""
    patch.setattr(Piece, "share", property(lambda self: (self.begin, self.end)))


def shift_queries(patch: pytest.MonkeyPatch) -> None:
    """The last tp rank turns its queries, not its keys, by one position more."""
    _shift(patch, keys=False)


def shift_queries_and_keys(patch: pytest.MonkeyPatch) -> None:
    """The last tp rank turns both by one position more: this is no fault."""
    _shift(patch, keys=True)


def _shift(patch: pytest.MonkeyPatch, *, keys: bool) -> None:
    start, rotate = Engine.__init__, Rope.rotate

    def init(self: Engine, recipe: Any, grid: Any, ops: Any) -> None:
        start(self, recipe, grid, ops)
        is_last = grid.tp.size > 1 and grid.tp.rank == grid.tp.size - 1
        for block in self.model.blocks:
            block.layers[0].branch.rope.is_wrong = is_last

    def turn(self: Rope, x: Any, positions: Any, *, inverse: bool = False) -> None:
        is_query = x.shape[2] > 1
        wrong = self.is_wrong and (is_query or keys)
        # A new array each time, as the table is kept for the same one.
        rotate(self, x, positions + 1 if wrong else positions, inverse=inverse)

    patch.setattr(Engine, "__init__", init)
    patch.setattr(Rope, "rotate", turn)


def shift_learned_positions(patch: pytest.MonkeyPatch) -> None:
    """The first tp rank looks up learned positions one place on."""
    whole = Embedding.forward

    def forward(self: Embedding, x: Any, step: Any) -> Any:
        if self.stream.tp.size == 1 or self.stream.tp.rank:
            return whole(self, x, step)
        data = self.position.data
        self.position.data = np.roll(data, -1, axis=0)
        try:
            return whole(self, x, step)
        finally:
            self.position.data = data

    patch.setattr(Embedding, "forward", forward)


def reseed_last_rank(patch: pytest.MonkeyPatch) -> None:
    """The last tp rank draws its dropout masks from another seed."""
    start = Engine.__init__

    def init(self: Engine, recipe: Any, grid: Any, ops: Any) -> None:
        start(self, recipe, grid, ops)
        if grid.tp.size > 1 and grid.tp.rank == grid.tp.size - 1:
            self.recipe = replace(recipe, {"train.seed": recipe.train.seed + 1})

    patch.setattr(Engine, "__init__", init)


def lose_the_loss(patch: pytest.MonkeyPatch) -> None:
    """The loss that is reported is no number; all else is right."""
    whole = Engine._counted

    def counted(self: Engine, loss: float) -> float:
        return whole(self, loss) if self.grid.world.size == 1 else float("nan")

    patch.setattr(Engine, "_counted", counted)
