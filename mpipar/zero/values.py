"""Where parameter values live: whole on every rank, or gathered when a unit runs."""

from collections.abc import Sequence
from typing import Any

from mpipar.zero.buffers import UnitBuffers
from mpipar.zero.flat import FlatState

Array = Any


class WholeValues:
    """Stages 0 to 2: every rank holds all values.

    After an update each rank sends what it has updated: an all-gather per unit where
    `shard` has several ranks, (S−1)/S of the values.

    flat    holds the values, its units padded for shard.size
    shard   communicator of the ranks that update a part each; None where each updates
            all
    """

    def __init__(self, flat: FlatState, shard: Any) -> None:
        self.flat, self.shard = flat, shard

    @property
    def nbytes(self) -> int:
        """Bytes of the values that stay on this rank."""
        return self.flat.data.nbytes

    buffer_bytes = 0

    def own(self, index: int) -> Array:
        """What this rank updates of a unit."""
        data = self.flat.data[self.flat.units[index].stretch]
        return data if self.shard is None else cut(data, self.shard)

    def bind(self) -> None:
        """Makes the parameters views of these values, where others are bound."""
        for unit in self.flat.units:
            unit.bind_values(self.flat.data[unit.stretch])

    def whole(self, index: int) -> Array:
        """The (size,) values of a unit."""
        return self.flat.data[self.flat.units[index].stretch]

    def set(self, index: int, whole: Array) -> None:
        """Takes (size,) values in the compute type for a unit."""
        unit = self.flat.units[index]
        self.flat.rounding.store(unit, 0, whole, self.flat.data[unit.stretch])

    def need(self, now: Sequence[int], later: Sequence[int] = ()) -> None:
        """Units `now` are about to run; always ready."""

    def done(self, index: int) -> None:
        """Unit `index` has run."""

    def changed(self) -> None:
        """The own parts were updated: spreads them."""
        handles = []
        for index, unit in enumerate(self.flat.units if self.shard else ()):
            whole = self.flat.data[unit.stretch]
            handles.append(self.shard.all_gather_start(self.own(index), out=whole))
        for handle in handles:
            handle.wait()


class GatheredValues:
    """Stage 3: a rank keeps its part of every unit; a unit is gathered when it runs.

    Blocks are gathered into 1 + prefetch buffers of the size of the largest. While one
    runs, the next `prefetch` in the direction of the pass are on their way. A buffer
    is taken from a unit only when another one needs it, so that the last blocks of a
    forward pass are still there when backward begins, and the first ones when the next
    micro-batch does. The root (embedding and head, which may share a weight) has
    buffers of its own and is gathered once per update.

    Volume of a step F BW F BW … with a micro-batches and B = 1 + prefetch < L blocks,
    in units of (S−1)/S of a block: a L forward, a (L − B) backward, less (a − 1) B: at
    most 2a.

    peak     most elements of blocks that were held whole at a time
    Source   Rajbhandari et al. 2020 (ZeRO stage 3); Zhao et al. 2023 (FSDP)
    """

    def __init__(self, flat: FlatState, shard: Any, prefetch: int) -> None:
        self.flat, self.shard = flat, shard
        part = flat.size // shard.size
        self._own = flat.zeros(part, flat.ops.operand_dtype, shared=False)
        self._buffers = UnitBuffers(flat, 1 + prefetch)
        # Units that are there, and those on their way
        self._ready: set[int] = set()
        self._handles: dict[int, Any] = {}
        self.peak = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the values that stay on this rank."""
        return self._own.nbytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that units are gathered into."""
        return self._buffers.nbytes

    def own(self, index: int) -> Array:
        """This rank's part of a unit."""
        return self._own[self.flat.units[index].stretch_of_parts(self.shard.size)]

    def bind(self) -> None:
        """Makes the parameters views of these values, where others are bound."""
        for index, unit in enumerate(self.flat.units):
            unit.bind_values(self._buffers.of(index) if index in self._ready else None)

    def whole(self, index: int) -> Array:
        """The (size,) values of a unit, gathered."""
        self.need([index])
        return self._buffers.of(index)

    def set(self, index: int, whole: Array) -> None:
        """Takes (size,) values in the compute type for a unit."""
        own = cut(whole, self.shard)
        begin = self.shard.rank * len(own)
        self.flat.rounding.store(self.flat.units[index], begin, own, self.own(index))
        self._drop(index)

    def need(self, now: Sequence[int], later: Sequence[int] = ()) -> None:
        """Units `now` are about to run, and then units `later`."""
        window = [*now, *later]
        for index in now:
            self._start(index, window)
        for index in now:
            self._finish(index)
        for index in later:
            self._start(index, window)

    def done(self, index: int) -> None:
        """Unit `index` has run: its buffer goes when another one needs it."""
        self._buffers.use(index)

    def changed(self) -> None:
        """The own parts were updated: what was gathered is out of date."""
        for index in [*self._handles, *self._ready]:
            self._drop(index)

    def _start(self, index: int, window: Sequence[int]) -> None:
        """Begins to gather a unit that is not there; those of the window stay."""
        if index in self._ready or index in self._handles:
            return
        buffers = self._buffers
        if index not in buffers.root:
            if buffers.is_full:
                self._drop(next(i for i in buffers.blocks if i not in window))
            buffers.add(index)
            whole = sum(self.flat.units[i].size for i in buffers.blocks)
            self.peak = max(self.peak, whole)
        out = buffers.of(index)
        self._handles[index] = self.shard.all_gather_start(self.own(index), out=out)

    def _finish(self, index: int) -> None:
        """Waits until a unit is there, and binds it."""
        handle = self._handles.pop(index, None)
        if handle is None:
            return
        handle.wait()
        self._ready.add(index)
        self.flat.units[index].bind_values(self._buffers.of(index))

    def _drop(self, index: int) -> None:
        self._finish(index)
        self.flat.units[index].bind_values(None)
        self._ready.discard(index)
        self._buffers.drop(index)


def cut(x: Array, shard: Any) -> Array:
    """This rank's of the equal parts of a (size,) array."""
    part = len(x) // shard.size
    return x[shard.rank * part : (shard.rank + 1) * part]
