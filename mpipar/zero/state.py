"""Values and gradients of a model in training, by ZeRO stage.

stage   values      gradients   moments     bytes for Ψ values on S ranks
                                            fp32              bf16, fp16
0       whole       whole       whole       16 Ψ              16 Ψ
1       whole       whole       a part      8 Ψ + 8 Ψ/S       4 Ψ + 12 Ψ/S
2       whole       a part      a part      4 Ψ + 12 Ψ/S      2 Ψ + 14 Ψ/S
3       a part      a part      a part      16 Ψ/S            16 Ψ/S

and, from stage 2 on, buffers for what is whole for a moment. In mixed precision values
and gradients are 16-bit, and fp32 masters lie with the moments; gradients that are
summed over several micro-batches are fp32 too, 2 Ψ or 2 Ψ/S more. With S ranks of N in
a group, N/S groups hold the same parts (hybrid sharding).

Source   Rajbhandari et al. 2020; Zhao et al. 2023; Micikevicius et al. 2018
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from mpipar.layers.model import Model, UnitHooks
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops
from mpipar.zero.cost import state_bytes
from mpipar.zero.flat import FlatState, Piece, Unit
from mpipar.zero.gradients import (
    BucketedGradients,
    Partials,
    ScatteredGradients,
    ShardedGradients,
)
from mpipar.zero.masters import Masters
from mpipar.zero.rounding import Rounding
from mpipar.zero.values import GatheredValues, WholeValues, cut

Array = Any
# Parts begin at multiples of a cache line, and of what a GPU reads at once.
ALIGNED_BYTES = 128


class TrainingState(UnitHooks):
    """What a rank holds of a model in training, and what happens when units run.

    axis       of the grid: only the parameters that are summed over it
    stage      0 to 3; 0 where there is nothing to share
    grad       communicator of the ranks over which gradients are summed
    shard      of those of them that share one set of parts; replicas  of those that
               hold the same parts
    partials   communicator of each axis that parameters name as `partial`
    ties       of the pipeline stages that both have a tied weight
    accumulation   micro-batches of a step;  rounding  of values
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        axis: str,
        stage: int,
        grad: Any,
        shard: Any,
        replicas: Any,
        partials: Mapping[str, Any],
        ties: Any,
        prefetch: int = 1,
        bucket_bytes: float = 0.0,
        accumulation: int = 1,
        rounding: Rounding | None = None,
    ) -> None:
        self.grad = grad
        self.stage = stage if shard.size > 1 else 0
        self.shard = shard if self.stage else None
        # Every rank of stage 0 updates all: sums and buffers have the same axis.
        self.replicas = replicas if self.stage else grad
        self.ties, self.prefetch, self._chunks = ties, prefetch, model.chunks
        self.accumulation = accumulation
        groups = model.groups(axis)
        self._uses = groups.uses
        # Units of the model that read a group: it is reduced when the first one's
        # gradients are there, and final once that is so for all of them. Where they are
        # in different chunks, they are at different micro-batches, which may not be
        # added up in 16 bits.
        readers = [set() for _ in groups.parameters]
        for unit, used in enumerate(groups.uses):
            for group in used:
                readers[group].add(unit)
        self._readers, self._finals = readers, set()
        sums = Partials(partials, ops.xp)
        item = ops.operand_dtype.itemsize
        self.flat = FlatState(
            groups.parameters,
            ops,
            self.shard or grad,
            root=groups.ends,
            multiple=shard.size * ALIGNED_BYTES // item if self.stage else 1,
            values=self.stage < 3,
            gradients=self.stage < 2,
            grad_dtype=ops.dtype if accumulation > 1 else ops.operand_dtype,
            rounding=rounding,
        )
        if self.stage == 0:
            self.gradients = BucketedGradients(self.flat, grad, sums, bucket_bytes)
        else:
            kind = ScatteredGradients if self.stage == 1 else ShardedGradients
            self.gradients = kind(self.flat, shard, replicas, sums)
        if self.stage < 3:
            self.values = WholeValues(self.flat, self.shard)
        else:
            self.values = GatheredValues(self.flat, shard, prefetch)
        part = (self.shard.rank, self.shard.size) if self.shard else (0, 1)
        self.masters = Masters(self.flat, self.values, *part)

    def initialize(self, seed: int) -> None:
        """Starting values, a unit at a time."""
        for index, unit in enumerate(self.flat.units):
            if not self.shard:
                whole = self.masters.own(index)
            elif self.flat.ops.is_mixed or self.stage == 3:
                whole = self.flat.ops.zeros((unit.size,))
            else:
                whole = self.values.whole(index)
            with self._writing(index, whole):
                for p in unit.parameters:
                    p.initialize(self.flat.ops, seed)

    def updated(self) -> None:
        """The masters are others: rounds and spreads their values."""
        self.masters.round()
        self.values.changed()

    def spread(self) -> None:
        """The optimizer has updated masters, and own values where they are those to
        the nearest: spreads these."""
        if self.flat.rounding.is_stochastic:
            self.masters.round()
        self.values.changed()

    def pieces(self) -> list[Piece]:
        """What this rank updates of each unit."""
        found = []
        for index, unit in enumerate(self.flat.units):
            data, grad = self.masters.own(index), self.gradients.own(index)
            begin = self.shard.rank * len(data) if self.shard else 0
            copies = self.replicas.rank, self.replicas.size
            # Where masters are rounded by draws, that comes after the update.
            nearest = self.flat.ops.is_mixed and not self.flat.rounding.is_stochastic
            rounded = self.values.own(index) if nearest else None
            end = begin + len(data)
            found.append(Piece(unit, begin, end, data, grad, *copies, rounded))
        return found

    @property
    def count(self) -> int:
        """How many units `whole_units` gives."""
        return len(self.flat.units)

    @property
    def parameters(self) -> list[Parameter]:
        """All of them, in memory order."""
        return self.flat.parameters

    def copies(self) -> tuple[Any, list[Array]]:
        """The ranks that hold the same values, and these, by unit."""
        units = self.flat.units
        if self.stage == 3:
            return self.replicas, [self.values.own(i) for i in range(len(units))]
        return self.grad, [self.flat.data[unit.stretch] for unit in units]

    def held(self) -> dict[str, int]:
        """Bytes that this rank holds, under the names of metrics."""
        return {
            "params": self.values.nbytes,
            "grads": self.gradients.nbytes,
            "masters": self.masters.nbytes,
            "unit_buffers": self.values.buffer_bytes + self.gradients.buffer_bytes,
        }

    def predicted(self) -> dict[str, int]:
        """The same, and bytes of moments, by formula."""
        ops = self.flat.ops
        return state_bytes(
            [unit.size for unit in self.flat.units],
            self.flat.root,
            stage=self.stage,
            ranks=self.shard.size if self.shard else 1,
            prefetch=self.prefetch,
            accumulation=self.accumulation,
            beside=self.has_parts_beside,
            item=ops.dtype.itemsize,
            operand_item=ops.operand_dtype.itemsize,
        )

    # What the executor tells of the model's units

    def forward_begins(self, index: int) -> None:
        self._need(index, +1)

    def forward_ended(self, index: int) -> None:
        self._done(index)

    def backward_begins(self, index: int) -> None:
        self._need(index, -1)

    def backward_ended(self, index: int) -> None:
        self._done(index)

    def weight_begins(self, index: int) -> None:
        for group in self._uses[index]:
            self.gradients.need(group)

    def weight_ended(self, index: int, *, last: bool) -> None:
        if last:
            self._finals.add(index)
        for group in reversed(self._uses[index]):
            readers = self._readers[group]
            final = last and readers <= self._finals
            if final or index == min(readers) or self._is_apart(readers):
                self.gradients.done(group, last=final)

    @property
    def has_parts_beside(self) -> bool:
        """True where sums of a group may arrive more than once in a step."""
        return self.accumulation > 1 or any(map(self._is_apart, self._readers))

    def _is_apart(self, readers: set[int]) -> bool:
        """True for units of different chunks."""
        return not any(readers <= set(chunk) for chunk in self._chunks)

    def begin(self) -> None:
        """A step begins: nothing is summed yet."""
        self._finals.clear()
        self.gradients.begin()

    def finish_sums(self) -> None:
        """Waits until all gradients are sums over all axes but those of `ties`."""
        self.gradients.finish()

    def ties_start(self) -> list[Any]:
        """Begins to add up gradients of tied weights, whose parts lie alike on both
        stages; what is to be waited for."""
        return [
            self.ties.all_reduce_start(self.gradients.own(index))
            for index, unit in enumerate(self.flat.units)
            if unit.is_tied
        ]

    def finish(self) -> None:
        """Waits until all gradients are sums over all of their axes."""
        self.finish_sums()
        for handle in self.ties_start():
            handle.wait()

    def take_masters(self, other: "TrainingState") -> None:
        """Sets the masters to those of another state of the same model."""
        for index in range(len(self.flat.units)):
            self.masters.own(index)[...] = other.masters.own(index)

    def bind(self) -> None:
        """Makes the parameters views of this state, where they are of another one."""
        self.values.bind()
        self.gradients.bind()

    def _need(self, index: int, then: int) -> None:
        """Values of a unit, and soon of those in direction `then` in its chunk."""
        chunk = next(chunk for chunk in self._chunks if index in chunk)
        ahead = [index + then * step for step in range(1, 1 + self.prefetch)]
        later = [g for i in ahead if i in chunk for g in self._uses[i]]
        self.values.need(self._uses[index], later)

    def _done(self, index: int) -> None:
        for group in self._uses[index]:
            self.values.done(group)

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
        """The unit with its values or summed gradients whole and wide; collective.

        What is written to values in here is kept.
        """
        unit = self.flat.units[index]
        if kind == "values":
            mixed = self.flat.ops.is_mixed
            own = self.masters.own(index)
            whole = self._whole(own) if mixed else self.values.whole(index)
            with self._writing(index, whole):
                yield unit
            return
        before = [p.grad for p in unit.parameters]
        whole = self._whole(self.gradients.own(index))
        unit.bind_gradients(self.flat.ops.wide(whole))
        try:
            yield unit
        finally:
            for p, grad in zip(unit.parameters, before, strict=True):
                p.grad = grad

    def _whole(self, own: Array) -> Array:
        return self.shard.all_gather(own) if self.shard else own

    @contextmanager
    def _writing(self, index: int, whole: Array) -> Iterator[None]:
        """The unit's values are `whole`, which is then kept."""
        unit, own = self.flat.units[index], self.masters.own(index)
        before = [p.data for p in unit.parameters]
        unit.bind_values(whole)
        try:
            yield
        finally:
            for p, data in zip(unit.parameters, before, strict=True):
                p.data = data
        own[...] = cut(whole, self.shard) if self.shard else whole
        self.values.set(index, whole)
