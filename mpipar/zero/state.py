"""Values and gradients of a model in training, by ZeRO stage.

stage   values      gradients   moments     bytes of an fp32 model of Ψ values, S ranks
0       whole       whole       whole       16 Ψ
1       whole       whole       a part      8 Ψ + 8 Ψ/S
2       whole       a part      a part      4 Ψ + 12 Ψ/S
3       a part      a part      a part      16 Ψ/S

and, from stage 2 on, buffers for what is whole for a moment. With S ranks of N in a
group, N/S groups hold the same parts (hybrid sharding).

Source   Rajbhandari et al. 2020; Zhao et al. 2023
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from mpipar.layers.model import Model, UnitHooks
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops
from mpipar.zero.flat import FlatState, Piece, Unit
from mpipar.zero.gradients import (
    BucketedGradients,
    Partials,
    ScatteredGradients,
    ShardedGradients,
)
from mpipar.zero.values import GatheredValues, WholeValues

Array = Any
# Parts begin at multiples of a cache line, and of what a GPU reads at once.
ALIGNED_BYTES = 128


class TrainingState(UnitHooks):
    """What a rank holds of a model in training, and what happens when units run.

    stage      0 to 3; 0 where there is nothing to share
    grad       communicator of the ranks over which gradients are summed
    shard      of those of them that share one set of parts; replicas  of those that
               hold the same parts
    partials   communicator of each axis that parameters name as `partial`
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        stage: int,
        grad: Any,
        shard: Any,
        replicas: Any,
        partials: Mapping[str, Any],
        prefetch: int = 1,
        bucket_bytes: float = 0.0,
    ) -> None:
        self.stage = stage if shard.size > 1 else 0
        self.shard = shard if self.stage else None
        units = list(model.unit_parameters())
        sums = Partials(partials, ops.xp)
        if self.stage == 0:
            # Every rank updates all: the axis of the sums is that of the buffers.
            self.replicas = grad
            self.flat = FlatState(units, ops, grad)
            self.gradients = BucketedGradients(self.flat, grad, sums, bucket_bytes)
            self.values = WholeValues(self.flat, None)
            return
        self.replicas = replicas
        self.flat = FlatState(
            units,
            ops,
            shard,
            multiple=shard.size * ALIGNED_BYTES // ops.dtype.itemsize,
            values=self.stage < 3,
            gradients=self.stage < 2,
        )
        kind = ScatteredGradients if self.stage == 1 else ShardedGradients
        self.gradients = kind(self.flat, shard, replicas, sums)
        if self.stage < 3:
            self.values = WholeValues(self.flat, shard)
        else:
            self.values = GatheredValues(self.flat, shard, prefetch)

    def pieces(self) -> list[Piece]:
        """What this rank updates of each unit."""
        found = []
        for index, unit in enumerate(self.flat.units):
            data, grad = self.values.own(index), self.gradients.own(index)
            begin = self.shard.rank * len(data) if self.shard else 0
            found.append(Piece(unit, begin, begin + len(data), data, grad))
        return found

    # What the executor tells

    def forward_begins(self, index: int) -> None:
        self.values.need(index, +1)

    def forward_ended(self, index: int) -> None:
        self.values.done(index)

    def backward_begins(self, index: int) -> None:
        self.values.need(index, -1)
        self.gradients.need(index)

    def backward_ended(self, index: int, *, last: bool) -> None:
        self.gradients.done(index, last=last)
        self.values.done(index)

    # For those who look at whole tensors

    def whole_units(
        self, kind: Literal["values", "gradients"]
    ) -> Iterator[list[Parameter]]:
        """The parameters of one unit after the other, each while it is `shown`."""
        for index in range(len(self.flat.units)):
            with self.shown(index, kind) as unit:
                yield unit.parameters

    @contextmanager
    def shown(self, index: int, kind: Literal["values", "gradients"]) -> Iterator[Unit]:
        """The unit with its values or summed gradients whole; collective.

        What is written to values in here is kept.
        """
        unit = self.flat.units[index]
        if kind == "values":
            with self.values.shown(index):
                yield unit
            return
        if self.stage == 0:
            yield unit
            return
        whole = self.shard.all_gather(self.gradients.own(index))
        before = [p.grad for p in unit.parameters]
        unit.bind_gradients(whole)
        yield unit
        for p, grad in zip(unit.parameters, before, strict=True):
            p.grad = grad
