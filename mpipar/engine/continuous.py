"""Training without a break between batches: PipeDream-2BW.

Batch k runs on the weights that batch k − 2 led to, W_k+1 = W_k − update(∇f_k(W_k−1)),
so that forward passes of one batch need not wait for the backward passes of the one
before. Two states hold what batches of even and of odd numbers see and add up.

Source   Narayanan et al. 2021 (Memory-efficient pipeline-parallel DNN training)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpipar.checkpoint import Manifest
from mpipar.config import Recipe
from mpipar.data import Batch
from mpipar.engine.engine import Engine, StepResult
from mpipar.layers.model import UnitHooks
from mpipar.ops import Ops
from mpipar.pipeline.schedules import Action, make_schedule, without_break
from mpipar.pipeline.simulate import Costs, Simulation, simulate
from mpipar.zero.state import TrainingState

# Batches of a simulation
MANY = 32


class Versions(UnitHooks):
    """Passes on what the executor tells to the state of the batch that it works on.

    current, previous   states of a batch and of the one before, if there is one
    settlement          of the one before; begins when nothing more is added to it
    """

    def __init__(
        self, current: TrainingState, previous: TrainingState, settlement: Any
    ) -> None:
        self.current, self.previous = current, previous
        self.settlement, self.active = settlement, current
        current.bind()

    def action_begins(self, number: int) -> None:
        state = self.previous if number < 0 else self.current
        if state is not self.active:
            state.bind()
            self.active = state

    def action_ended(self, number: int) -> None:
        if self.settlement is not None and (number == -1 or self.settlement.has_begun):
            self.settlement.poll()

    def forward_begins(self, index: int) -> None:
        self.active.forward_begins(index)

    def forward_ended(self, index: int) -> None:
        self.active.forward_ended(index)

    def backward_begins(self, index: int) -> None:
        self.active.backward_begins(index)

    def backward_ended(self, index: int) -> None:
        self.active.backward_ended(index)

    def weight_begins(self, index: int) -> None:
        self.active.weight_begins(index)

    def weight_ended(self, index: int, *, last: bool) -> None:
        self.active.weight_ended(index, last=last)


class OpenBatch(NamedTuple):
    """This rank's loss sum of a batch that has not led to an update, all its valid
    labels, what its loss was multiplied by, and loads of experts."""

    loss: Any
    valid: int
    scale: float
    loads: dict[str, Any]


class Settlement:
    """Makes the gradients of one batch final and agrees on their norm, while the next
    batch runs: stages are done with a batch at different times.

    votes   sums of all ranks, once `wait` has returned
    """

    def __init__(
        self,
        engine: "ContinuousEngine",
        state: TrainingState,
        open_batch: OpenBatch,
        said: Sequence[bool],
    ) -> None:
        self.engine, self.state, self.open, self.said = engine, state, open_batch, said
        self.has_begun = False
        self._ties: list[Any] = []
        self._agreed: Any = None

    def poll(self) -> None:
        """Goes as far as is possible without waiting for another stage."""
        if not self.has_begun:
            self.has_begun = True
            self.state.bind()
            self.state.finish_sums()
            self._ties = self.state.ties_start()
        if self._agreed is None and all([handle.test() for handle in self._ties]):
            self._agree()
        elif self._agreed is not None:
            self._agreed.test()

    def wait(self) -> Any:
        """The sums of all ranks."""
        self.poll()
        if self._agreed is None:
            self._agree()
        return self._agreed.wait()

    def _agree(self) -> None:
        for handle in self._ties:
            handle.wait()
        engine = self.engine
        engine.optimizer.pieces = self.state.pieces()
        votes = engine._votes(self.open.loss, self.open.loads, self.said)
        self._agreed = engine.grid.world.all_reduce_start(votes)


class ContinuousEngine(Engine):
    """An engine whose steps end one call later, or in `drain`."""

    saved_kinds = (*Engine.saved_kinds, "previous")

    def __init__(self, recipe: Recipe, grid: Any, ops: Ops) -> None:
        super().__init__(recipe, grid, ops)
        # That of a batch which is worked on again; 0 = the next one is another
        self._again_scale = 0.0
        self.states.append(self._make_state())
        self._rewind()
        self.states[1].initialize(recipe.train.seed)

    @property
    def begun(self) -> int:
        return self.number + (self._open is not None)

    @property
    def open_scale(self) -> float:
        return self._open.scale if self._open else self._again_scale

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """Many batches: how it begins and ends hardly counts."""
        shape = self.schedule.stages, self.schedule.micro_batches
        return simulate(make_schedule("2bw", *shape, batches=MANY), costs)

    def step(
        self,
        batches: Sequence[Batch],
        valid: int,
        *,
        stop: bool = False,
        saved: bool = False,
    ) -> StepResult | None:
        """Begins a batch and ends the one before, whose result is returned."""
        current, previous = self.states[self._turn], self.states[1 - self._turn]
        settlement, pp = self._settlement(previous, (stop, saved)), self.grid.pp
        actions = without_break(pp.size, pp.rank, len(batches))
        if settlement is None:
            actions = [action for action in actions if action.micro_batch >= 0]
        scale = self._next_scale()
        with self._overflows_expected():
            if settlement is not None and pp.rank == pp.size - 1:
                settlement.poll()
            self.executor.hooks = Versions(current, previous, settlement)
            current.begin()
            self.loads = {}
            losses = self._run(actions, batches, valid, training=True, goes_on=True)
            result = self._settle(settlement)
        self._open = OpenBatch(sum(losses), valid, scale, self.loads)
        self._again_scale = 0.0
        self._turn = 1 - self._turn
        return result

    def drain(self) -> StepResult | None:
        if self._open is None:
            return None
        current, previous = self.states[self._turn], self.states[1 - self._turn]
        settlement = self._settlement(previous, (False, False))
        lag = self.grid.pp.size - 1 - self.grid.pp.rank
        actions = [Action("BW", number) for number in range(-lag, 0)]
        self.executor.hooks = Versions(current, previous, settlement)
        peak = self.executor.peak_bytes
        shapes = [self.model.stream_shape(*self.micro_shape)] * lag
        with self._overflows_expected():
            self.executor.run(actions, [], shapes, [])
            result = self._settle(settlement)
        # Nothing is added to what was held in the batch itself.
        self.executor.peak_bytes = peak
        self._open = None
        # Whatever follows begins anew, on the same weights in both states.
        current.take_masters(previous)
        current.updated()
        self._rewind()
        return result

    def _rewind(self) -> None:
        """The next batch is a first one; the latest weights are bound."""
        self._turn, self._open = 0, None
        self.executor.hooks = self.state
        self.state.bind()

    def _settlement(
        self, state: TrainingState, said: Sequence[bool]
    ) -> Settlement | None:
        """That of the batch that is open, if one is."""
        if self._open is None:
            return None
        return Settlement(self, state, self._open, said)

    def _settle(self, settlement: Settlement | None) -> StepResult | None:
        """Updates by the batch that was open; its state then has the latest weights."""
        if settlement is None:
            return None
        votes, state = settlement.wait(), settlement.state
        self.before_update()
        state.take_masters(self._other(state))
        result = self._update(state, votes, self._open.valid, self._open.scale)
        if not result.updated:
            state.updated()
        self.number += 1
        self.state, self.flat = state, state.flat
        self.executor.hooks = state
        state.bind()
        return result

    def _saved_arrays(self) -> dict[str, list[Any]]:
        """Also the weights that the batch which is open has seen: it is not saved, and
        is worked on again by who goes on from here."""
        previous = self._other(self.state).pieces()
        return super()._saved_arrays() | {"previous": [p.data for p in previous]}

    def restore(self, folder: Path, manifest: Manifest) -> None:
        # The next batch is of states[0], which has seen less than the other one
        self.state = self.states[1]
        self.flat = self.state.flat
        super().restore(folder, manifest)
        if self.loss_scale.value == manifest.progress.loss_scale:
            self._again_scale = manifest.progress.open_scale
        self._rewind()

    def _next_scale(self) -> float:
        return self._again_scale or super()._next_scale()

    def _other(self, state: TrainingState) -> TrainingState:
        return self.states[1 - self.states.index(state)]


def open_engine(recipe: Recipe, grid: Any, ops: Ops) -> Engine:
    """The kind of engine that the schedule of a resolved recipe needs."""
    kind = ContinuousEngine if recipe.parallel.schedule == "2bw" else Engine
    return kind(recipe, grid, ops)
