"""The engine: model, gradients, optimizer and schedule of one rank on one layout.

Training and verification both run it; a serial model is the same engine on a grid whose
axes all have size 1.
"""

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint import Fragment, Manifest, fragments_of, load
from mpipar.comm import raise_together
from mpipar.config import Recipe
from mpipar.data import Batch
from mpipar.engine.experts import bias_moves, expert_cut, loads_of, mixtures_of
from mpipar.engine.learning_rate import learning_rate
from mpipar.engine.memory import held_memory, predicted_memory
from mpipar.engine.sequence import OwnSequence
from mpipar.engine.stages import block_counts, own_chunks, plan_schedule
from mpipar.errors import CheckpointError
from mpipar.layers.base import Step
from mpipar.models import build_model
from mpipar.ops import Ops
from mpipar.pipeline.executor import Executor
from mpipar.pipeline.replay import Replays
from mpipar.pipeline.schedules import Action, forward_only
from mpipar.pipeline.simulate import Costs, Simulation, costs_of, simulate
from mpipar.pipeline.transfer import Transfer
from mpipar.zero.adamw import AdamW, Hyper
from mpipar.zero.joint import JointState
from mpipar.zero.loss_scale import LossScale
from mpipar.zero.rounding import Rounding
from mpipar.zero.state import TrainingState


@dataclass(frozen=True)
class StepResult:
    """What one step did, equal on all ranks.

    loss       mean over the valid tokens of the global batch, nats per token
    grad_norm  global norm before clipping
    updated    False where the norm was not finite and the step was skipped
    loss_scale what the loss was multiplied by, 1 but in fp16
    bubble     part of the time of forward and backward passes, over all ranks, that
               stages waited for each other
    stop       how many ranks asked to stop
    saved      how many ranks have done their part of a save
    loads      by block with experts: (experts + 1,) choices that fell on each expert,
               and those that were dropped
    """

    loss: float
    grad_norm: float
    lr: float
    updated: bool
    loss_scale: float
    bubble: float
    stop: int
    saved: int
    loads: dict[str, np.ndarray] = field(default_factory=dict)


def finite(number: float) -> float | None:
    """The number, or None (null in JSON, which knows no NaN) where it is not finite."""
    return number if math.isfinite(number) else None


class Engine:
    """Model and training state of this rank.

    recipe   resolved for the grid's size
    grid     `Grid`, or `serial_grid()` for the serial model
    saved_kinds   kinds of numbers that a checkpoint has of it
    """

    saved_kinds = ("weights", "m", "v")

    def __init__(self, recipe: Recipe, grid: Any, ops: Ops) -> None:
        self.recipe, self.grid, self.ops = recipe, grid, ops
        self.sequence = OwnSequence(recipe, grid, ops)
        self.schedule = plan_schedule(recipe, recipe.accumulation)
        self.block_counts = block_counts(
            recipe, self.schedule, grid, ops, self.sequence
        )
        self.model = build_model(
            recipe.model,
            ops=ops,
            tp=grid.tp,
            sequence=recipe.parallel.sequence,
            chunks=own_chunks(self.schedule, self.block_counts, grid.pp.rank),
            core=self.sequence.core,
            experts=recipe.experts,
            cut=expert_cut(recipe, grid),
        )
        self.model.join_blocks(recipe.parallel.unit)
        if recipe.train.recompute == "selective":
            for block in self.model.blocks:
                block.forget()
        is_drawn = recipe.optimizer.rounding == "stochastic"
        self.rounding = Rounding(ops, recipe.train.seed if is_drawn else None)
        self.state = self._make_state()
        self.flat = self.state.flat
        self.state.initialize(recipe.train.seed)
        o = recipe.optimizer
        hyper = Hyper(o.beta1, o.beta2, o.eps, o.weight_decay, recipe.train.clip)
        self.optimizer = AdamW(self.state.pieces(), ops, hyper)
        self.loss_scale = LossScale()
        if ops.precision == "fp16":
            train = recipe.train
            self.loss_scale = LossScale(train.loss_scale, train.loss_scale_window)
        model = self.model
        again = model.block_units() if recipe.train.recompute == "full" else ()
        transfer = Transfer(grid.pp, self.schedule, ops)
        is_recorded = recipe.train.graph and not ops.on_host
        self.executor = Executor(
            model.units, model.chunks, self.state, transfer, again,
            Replays(ops) if is_recorded else None,
        )  # fmt: skip
        self.states = [self.state]
        self.number = 0
        # Of the batch that began last, as `Step.loads`
        self.loads: dict[str, np.ndarray] = {}
        # Called before weights and moments change
        self.before_update: Callable[[], None] = lambda: None
        ops.account(self.held_memory)

    def _make_state(self) -> TrainingState | JointState:
        state = self._make_part("grad")
        if self.recipe.experts.count:
            # All ranks make them together, those of stages without experts too
            self._sharing("edp")
        if any(p.axis == "edp" for p in self.model.parameters()):
            return JointState([state, self._make_part("edp")])
        return state

    def _make_part(self, axis: str) -> TrainingState:
        """The state of the parameters that are summed over an axis of the grid."""
        parallel, grid = self.recipe.parallel, self.grid
        kv_heads, tp = self.recipe.model.kv_heads, grid.tp
        partials = {"tp": tp}
        if kv_heads < tp.size:
            partials["kv"] = grid.sub("tp", tp.size // kv_heads)
        shard, replicas = self._sharing(axis)
        return TrainingState(
            self.model,
            self.ops,
            axis=axis,
            stage=parallel.zero,
            grad=getattr(grid, axis),
            shard=shard,
            replicas=replicas,
            partials=partials,
            ties=grid.ends(),
            prefetch=parallel.prefetch,
            bucket_bytes=parallel.bucket_mb * 2**20,
            accumulation=self.recipe.accumulation,
            rounding=self.rounding,
        )

    def _sharing(self, axis: str) -> tuple[Any, Any]:
        """Ranks of an axis that share one copy of the state, and those that hold the
        same part of it. Collective when first asked."""
        grid, grad = self.grid, getattr(self.grid, axis)
        ranks = math.gcd(self.recipe.parallel.zero_shard, grad.size)
        shard = grad if ranks == grad.size else grid.sub(axis, ranks)
        return shard, grid.across(axis, ranks)

    def weights(self) -> int:
        """Elements of the whole model; collective."""
        count = np.zeros(2, np.int64)
        for p in self.model.parameters():
            if p.owner or not p.tied:
                count[int(p.axis == "edp")] += math.prod(p.shape)
        count[1:] = self.grid.ep.all_reduce(count[1:])
        return int(self.grid.pp.all_reduce(count).sum())

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """The schedule, with these times of its actions."""
        return simulate(self.schedule, costs)

    def simulate_measured(self) -> Simulation | None:
        """The schedule with the times that the stages' actions took so far; on rank 0
        alone. Collective."""
        work = self.grid.world.gather_obj((self.grid.pp.rank, self.executor.work))
        if work is None:
            return None
        # One rank stands for all that hold the same stage.
        stages = dict(work)
        rows = [stages[stage] for stage in range(self.schedule.stages)]
        return self.simulate(costs_of(self.schedule, rows))

    def gradients(self, batches: Sequence[Batch], valid: int) -> Any:
        """Fills the gradients with the sum over all axes; this rank's loss sum, on a
        device an array that the host has not waited for.

        They are those of the loss times `loss_scale.value`.

        batches  micro-batches of this data rank;  valid  labels of the whole step
        """
        self.state.begin()
        self.loads = {}
        schedule = self.schedule
        if len(batches) != schedule.micro_batches:
            schedule = plan_schedule(self.recipe, len(batches))
        actions = schedule.actions[self.grid.pp.rank]
        with self._overflows_expected():
            losses = self._run(actions, batches, valid, training=True)
            self.state.finish()
        return sum(losses)

    def _overflows_expected(self) -> np.errstate:
        """With a loss scale an overflow is part of the search for the largest one."""
        quiet = "warn" if self.loss_scale.is_fixed else "ignore"
        return np.errstate(over=quiet, invalid=quiet)

    @property
    def begun(self) -> int:
        """Batches that have been worked on; `number` of them have led to an update."""
        return self.number

    def step(
        self,
        batches: Sequence[Batch],
        valid: int,
        *,
        stop: bool = False,
        saved: bool = False,
    ) -> StepResult | None:
        """One optimizer step; `stop` tells others that this rank wants to end, `saved`
        that it has done its part of a save."""
        loss = self.gradients(batches, valid)
        votes = self._votes(loss, self.loads, (stop, saved))
        votes = self.grid.world.all_reduce(votes)
        result = self._update(self.state, votes, valid, self.loss_scale.value)
        self.number += 1
        return result

    def drain(self) -> StepResult | None:
        """Ends what `step` has only begun."""
        return None

    @property
    def open_scale(self) -> float:
        """What the loss of a batch that is open was multiplied by; 0 = none is open."""
        return 0.0

    def fragments(self, *, share: bool = False) -> list[Fragment]:
        """What this rank holds of weights and moments; the arrays are views.

        share   only what this rank saves: all ranks together have each element once
        """
        pieces = self.state.pieces()
        return list(fragments_of(pieces, self._saved_arrays(), share=share))

    def _saved_arrays(self) -> dict[str, list[Any]]:
        """What is saved, by kind, as an array for each piece."""
        m, v = self.optimizer.moments()
        return {"weights": [p.data for p in self.state.pieces()], "m": m, "v": v}

    def restore(self, folder: Path, manifest: Manifest) -> None:
        """Goes on from a checkpoint, whatever the layout was. Collective.

        Raises CheckpointError on all ranks together.
        """
        error = None
        fragments = self.fragments()
        kinds = {kind: kind for f in fragments for kind in f.arrays}
        if "previous" in kinds and "previous" not in manifest.kinds:
            kinds["previous"] = "weights"
        try:
            load(folder, manifest, fragments, self.ops, kinds)
        except (CheckpointError, OSError) as problem:
            error = problem
        raise_together(error, self.grid.world)
        progress = manifest.progress
        self.number, self.optimizer.count = progress.step, progress.updates
        self.rounding.updates = progress.updates
        for state in self.states:
            state.updated()
        scale, train = self.loss_scale, tomllib.loads(manifest.recipe).get("train", {})
        # A run in another precision has none to go on with.
        if not scale.is_fixed and train.get("precision") == "fp16":
            scale.value = progress.loss_scale
            scale.good = min(progress.good_steps, scale.window - 1)

    @property
    def micro_shape(self) -> tuple[int, int]:
        """Sequences of a micro-batch, and positions of each that this rank holds."""
        return self.recipe.train.micro_batch, len(self.sequence.own)

    def step_flops(self) -> int:
        """FLOPs of one step on this rank, by formula: three times forward."""
        cost = self.model.cost(*self.micro_shape)
        return 3 * cost.flops * self.recipe.accumulation

    def held_memory(self) -> dict[str, int]:
        """Bytes of the arrays that this rank holds now, by kind."""
        return held_memory(self)

    def predicted_memory(self) -> dict[str, int]:
        """Bytes that this rank should hold, by formula, under the names of metrics."""
        return predicted_memory(self)

    def evaluate(self, rounds: Sequence[Batch], valid: int) -> float:
        """Mean loss over the valid tokens of all ranks' batches, in nats per token."""
        p, chunks = self.schedule.stages, self.schedule.chunks
        actions = forward_only(len(rounds), chunks, group=2 * p)
        goes_on = self.begun > self.number
        losses = sum(self._run(actions, rounds, valid, training=False, goes_on=goes_on))
        total = np.array([float(self._counted(losses))])
        return float(self.grid.world.all_reduce(total)[0]) / max(valid, 1)

    def _run(
        self,
        actions: Sequence[Action],
        batches: Sequence[Batch],
        valid: int,
        *,
        training: bool,
        goes_on: bool = False,
    ) -> list[Any]:
        """Runs actions on micro-batches; the loss sum of each."""
        tokens = [self._tokens(batch) for batch in batches]
        steps = [self._step(batch, valid, training=training) for batch in batches]
        shapes = [self.model.stream_shape(*x.shape) for x in tokens]
        return self.executor.run(actions, tokens, shapes, steps, goes_on=goes_on)

    def _votes(
        self, loss: Any, loads: dict[str, np.ndarray], said: Sequence[bool]
    ) -> np.ndarray:
        """This rank's summands of square norm, loss, waiting and working seconds, ranks
        that say something, and loads of experts.

        Here the host waits for the device, for the first time in a step.
        """
        square = self.optimizer.square_norm()
        loss = float(self._counted(loss))
        own = np.array([square, loss, *self.executor.timing, *said])
        none = np.zeros(self.recipe.experts.count + 1)
        names = mixtures_of(self.recipe)
        return np.concatenate([own, *(loads.get(name, none) for name in names)])

    def _update(
        self, state: TrainingState, votes: np.ndarray, valid: int, scale: float
    ) -> StepResult:
        """Updates the masters of `state` by its gradients, and spreads their values.

        votes   sums of all ranks;  scale  of the loss that the gradients are of
        """
        square, loss, waited, seconds, stop, saved = votes[:6].tolist()
        norm, lr = square**0.5 / scale, learning_rate(self.recipe, self.number)
        loads = loads_of(votes[6:], self.recipe)
        self.before_update()
        updated = self.optimizer.update(lr, norm, scale)
        if updated:
            self.optimizer.move(bias_moves(loads, self.recipe.experts.bias_rate))
            self.rounding.updates = self.optimizer.count
            state.spread()
        self.loss_scale.note(good=updated)
        bubble = waited / seconds if seconds else 0.0
        loss = float(loss / max(valid, 1))
        said = int(stop), int(saved)
        return StepResult(loss, norm, lr, updated, scale, bubble, *said, loads)

    def _next_scale(self) -> float:
        """What the loss of the next batch is multiplied by."""
        return self.loss_scale.value

    def _counted(self, loss: Any) -> Any:
        """Ranks of tp hold the same loss: only the first counts."""
        return loss if self.grid.tp.rank == 0 else 0.0

    def _step(self, batch: Batch, valid: int, *, training: bool) -> Step:
        asarray, sequence = self.ops.asarray, self.sequence
        firsts = sequence.firsts(batch)
        places = sequence.places(firsts)
        return Step(
            positions=sequence.positions,
            samples=asarray(batch.samples),
            places=None if places is None else asarray(places),
            firsts=firsts,
            labels=asarray(sequence.labels(batch)),
            valid=valid,
            sequences=self.recipe.train.global_batch,
            length=self.recipe.model.context,
            loads=self.loads if training else None,
            number=self.begun,
            seed=self.recipe.train.seed,
            loss_scale=self._next_scale(),
            training=training,
        )

    def _tokens(self, batch: Batch) -> Any:
        return self.ops.asarray(self.sequence.tokens(batch))
