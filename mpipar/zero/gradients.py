"""Gradient sums over the ranks that hold the same parameters, during backward.

Parameters that are whole on ranks of a tensor-parallel group have summands there; these
are added up first. A tied weight has its other summand on another pipeline stage; this
is added last (`TrainingState.ties_start`), when neither stage has anything else to do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mpipar.layers.parameter import Parameter
from mpipar.zero.buffers import UnitBuffers
from mpipar.zero.flat import FlatState
from mpipar.zero.values import cut

Array = Any


class Partials:
    """Sums gradients that are summands over an axis, packed in one message.

    axes   communicator of each axis that parameters name as `partial`
    """

    def __init__(self, axes: Mapping[str, Any], xp: Any) -> None:
        self.axes, self.xp = axes, xp

    def sum(self, parameters: Sequence[Parameter]) -> None:
        """Replaces each gradient by its sum."""
        for axis, comm in self.axes.items():
            parts = [p.grad for p in parameters if p.partial == axis]
            if not parts:
                continue
            packed = self.xp.concatenate([g.reshape(-1) for g in parts])
            packed = comm.all_reduce(packed)
            start = 0
            for g in parts:
                g[...] = packed[start : start + g.size].reshape(g.shape)
                start += g.size


class WholeGradients:
    """Every rank holds all gradients; sums start when their last summand is there."""

    buffer_bytes = 0

    def __init__(self, flat: FlatState, partials: Partials) -> None:
        self.flat, self.partials = flat, partials
        self._handles: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that stay on this rank."""
        return self.flat.grad.nbytes

    def begin(self) -> None:
        """A step begins: nothing is summed yet."""
        self.flat.grad[...] = 0.0

    def bind(self) -> None:
        """Makes parameters' gradients views of these, where others are bound."""
        for unit in self.flat.units:
            unit.bind_gradients(self.flat.grad[unit.stretch])

    def need(self, index: int) -> None:
        """Gradients of unit `index` are about to be added to."""

    def done(self, index: int, *, last: bool) -> None:
        """Gradients of unit `index` were added to, for the last time or not."""
        if last:
            for handle in self._handles:
                handle.test()
            self._final(index)

    def _final(self, index: int) -> None:
        """The gradients of unit `index` are final."""
        raise NotImplementedError

    def _wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles.clear()


class BucketedGradients(WholeGradients):
    """Stage 0: every rank gets all sums.

    Backward finishes units from the last to the first. The reduction of a bucket starts
    as soon as all of its gradients are final. A bucket is the stretch of the flat
    gradient from the unit just finished to the last bucket started; one of at least
    `bucket_bytes` is reduced by one message (Li et al. 2020, 3.2.3). Volume 2 (N−1)/N
    of the gradients a step.

    axis   communicator of the data axis
    """

    def __init__(
        self, flat: FlatState, axis: Any, partials: Partials, bucket_bytes: float
    ) -> None:
        super().__init__(flat, partials)
        self.axis, self.bucket_bytes = axis, bucket_bytes
        # Where the last bucket begins, and how many units lie before the final ones
        self._open, self._left = flat.size, len(flat.units)
        self._finals: set[int] = set()

    def own(self, index: int) -> Array:
        """What this rank's optimizer reads of a unit's gradients."""
        return self.flat.grad[self.flat.units[index].stretch]

    def finish(self) -> None:
        """Waits until every gradient is the sum over all of its axes."""
        self._start(0)
        self._wait()
        self._open, self._left = self.flat.size, len(self.flat.units)
        self._finals.clear()
        self.partials.sum(self.flat.parameters)

    def _final(self, index: int) -> None:
        # A schedule may finish a unit before a later one.
        self._finals.add(index)
        while self._left - 1 in self._finals:
            self._left -= 1
        if self._left == len(self.flat.units):
            return
        lo = self.flat.units[self._left].begin
        if (self._open - lo) * self.flat.grad.dtype.itemsize >= self.bucket_bytes:
            self._start(lo)

    def _start(self, lo: int) -> None:
        if lo < self._open:
            part = self.flat.grad[lo : self._open]
            self._handles.append(self.axis.all_reduce_start(part))
            self._open = lo


class ScatteredGradients(WholeGradients):
    """Stage 1: each rank gets the sums of the part that it updates.

    A reduce-scatter per unit, started when the last micro-batch's backward has passed
    it, then an all-reduce among `replicas`, which update the same part. Volume (S−1)/S
    of the gradients a step, and 2 (R−1)/R of a part.

    Source   Rajbhandari et al. 2020 (ZeRO stage 1); Zhao et al. 2023 (hybrid sharding)
    """

    def __init__(
        self, flat: FlatState, shard: Any, replicas: Any, partials: Partials
    ) -> None:
        super().__init__(flat, partials)
        self.shard, self.replicas = shard, replicas

    def own(self, index: int) -> Array:
        """What this rank's optimizer reads of a unit's gradients."""
        return cut(self.flat.grad[self.flat.units[index].stretch], self.shard)

    def finish(self) -> None:
        """Waits until the own part of every gradient is the sum over all axes."""
        self._wait()
        sum_copies(self, self.replicas)

    def _final(self, index: int) -> None:
        unit = self.flat.units[index]
        self.partials.sum(unit.parameters)
        grad = self.flat.grad[unit.stretch]
        handle = self.shard.reduce_scatter_start(grad, out=self.own(index))
        self._handles.append(handle)


class ShardedGradients:
    """Stages 2 and 3: a rank keeps the sums it updates, and nothing else.

    Backward adds a unit's gradients to one of two buffers of the size of the largest
    block; a reduce-scatter per unit and micro-batch adds them to the own part, while
    backward fills the other one. Where there are several micro-batches, the own part is
    of the compute type. The root (embedding and head, which may share a weight) has
    buffers of its own. Volume a (S−1)/S of the gradients a step, and 2 (R−1)/R of a
    part.

    Source   Rajbhandari et al. 2020 (ZeRO stage 2)
    """

    def __init__(
        self, flat: FlatState, shard: Any, replicas: Any, partials: Partials
    ) -> None:
        self.flat, self.shard, self.replicas = flat, shard, replicas
        self.partials = partials
        part = flat.size // shard.size
        self._own = flat.zeros(part, flat.grad_dtype, shared=False)
        self._buffers = UnitBuffers(flat, 2)
        # Where sums of later micro-batches arrive; most runs have one
        self._sums: Array = None
        # Units that have a buffer to add to, those without sums so far, and sums that
        # are on their way
        self._bound: set[int] = set()
        self._fresh: set[int] = set()
        self._handles: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that stay on this rank."""
        return self._own.nbytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that backward fills."""
        sums = 0 if self._sums is None else self._sums.nbytes
        return self._buffers.nbytes + sums

    def own(self, index: int) -> Array:
        """What this rank's optimizer reads of a unit's gradients."""
        return self._own[self.flat.units[index].stretch_of_parts(self.shard.size)]

    def begin(self) -> None:
        """A step begins: nothing is summed yet."""
        self._fresh = set(range(len(self.flat.units)))

    def bind(self) -> None:
        """Makes parameters' gradients views of these, where others are bound."""
        for index, unit in enumerate(self.flat.units):
            unit.bind_gradients(
                self._buffers.of(index) if index in self._bound else None
            )

    def need(self, index: int) -> None:
        """Gradients of unit `index` are about to be added to: there must be some."""
        if index in self._bound:
            return
        buffers = self._buffers
        self._settle(index)
        if index not in buffers.root:
            if index not in buffers.blocks and buffers.is_full:
                oldest = buffers.blocks[0]
                self._settle(oldest)
                buffers.drop(oldest)
            if index not in buffers.blocks:
                buffers.add(index)
            buffers.use(index)
        buffer = buffers.of(index)
        buffer[...] = 0.0
        self.flat.units[index].bind_gradients(buffer)
        self._bound.add(index)

    def done(self, index: int, *, last: bool) -> None:
        """Gradients of unit `index` were added to, for the last time or not."""
        for handle in self._handles.values():
            handle.test()
        unit = self.flat.units[index]
        self.partials.sum(unit.parameters)
        grad, own = self._buffers.of(index), self.own(index)
        # Sums of a first micro-batch need no addition; later ones arrive beside.
        self._settle_sums()
        out = own if index in self._fresh else self._beside(len(own))
        self._handles[index] = self.shard.reduce_scatter_start(grad, out=out)
        unit.bind_gradients(None)
        self._bound.discard(index)

    def finish(self) -> None:
        """Waits until the own part of every gradient is the sum over all axes."""
        for index in list(self._handles):
            self._settle(index)
        for index in self._buffers.blocks:
            self._buffers.drop(index)
        sum_copies(self, self.replicas)

    def _beside(self, size: int) -> Array:
        if self._sums is None:
            largest = max(unit.size for unit in self.flat.units)
            part, dtype = largest // self.shard.size, self.flat.grad_dtype
            self._sums = self.flat.zeros(part, dtype, shared=False)
        return self._sums[:size]

    def _settle_sums(self) -> None:
        """Adds what arrives beside the own part, so that the next can."""
        for index in [i for i in self._handles if i not in self._fresh]:
            self._settle(index)

    def _settle(self, index: int) -> None:
        """Waits for the sums of a unit and adds them to the own part."""
        handle = self._handles.pop(index, None)
        if handle is None:
            return
        sums = handle.wait()
        if index in self._fresh:
            self._fresh.discard(index)
        else:
            ops = self.flat.ops
            ops.add_to(self.own(index), ops.wide(sums))


def sum_copies(gradients: Any, replicas: Any) -> None:
    """Adds up the own parts of ranks that hold the same ones."""
    if replicas.size == 1:
        return
    handles = [
        replicas.all_reduce_start(gradients.own(index))
        for index in range(len(gradients.flat.units))
    ]
    for handle in handles:
        handle.wait()
