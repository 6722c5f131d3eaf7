"""One training run, from a resolved recipe to its run folder."""

import secrets
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpipar.checkpoint import Copies, Saver, remove_drafts
from mpipar.comm import file_work, raise_together
from mpipar.comm.losses import losses_told
from mpipar.config import Recipe, to_toml
from mpipar.data import Loader, Sampler, unigram_entropy
from mpipar.engine import (
    Engine,
    StepResult,
    check_copies,
    load_vocabulary,
    make_sampler,
    open_engine,
    open_grid,
)
from mpipar.errors import CheckpointError, ConfigError
from mpipar.ops import bf16_obstacle
from mpipar.train.metrics import Metrics, write_summary
from mpipar.train.progress import make_progress
from mpipar.train.recovery import Phase, Recovery
from mpipar.train.resume import RECIPE, Start, find_start, with_offer
from mpipar.train.saves import Saves
from mpipar.train.signals import StopSignals
from mpipar.train.stragglers import Stragglers

DONE, STOPPED = 0, 3


def run_training(recipe: Recipe, world: Any, out: Path, resume: str = "") -> int:
    """Trains `recipe` and writes `out`; the exit status, 0 or 3 (stopped by a signal,
    or after train.max_hours).

    recipe   resolved for the size of world
    world    MPI communicator of all ranks
    out      the run folder, which must not hold a run yet unless that goes on
    resume   "" = begin anew; "auto" = go on from the newest checkpoint in `out`, where
             there is one; else the path of a checkpoint or a run to go on from
    Raises   ConfigError, DataError or CheckpointError on all ranks together
    """
    phase = Phase(recipe, resume, time.monotonic())
    if recipe.train.recover:
        return Recovery(partial(_attempt, out), phase, out).run(world)
    return _attempt(out, phase, world)


def _attempt(out: Path, phase: Phase, world: Any) -> int:
    """Trains until the end, or until a rank is lost: then RankLostError is raised."""
    grid, ops = open_grid(phase.recipe, world)
    with grid, losses_told(world):
        recipe, tokenizer = load_vocabulary(phase.recipe, grid.world)
        start = find_start(phase.resume, out, recipe, grid.world, again=phase.is_later)
        steps, done = recipe.train.steps, start.progress
        if done.step >= steps:
            if grid.world.rank == 0:
                print(f"nothing to do: {start.folder} is step {done.step} of {steps}")
            return DONE
        _on_rank_0(_make_folder, out, recipe, grid.world)
        sampler = make_sampler(recipe, tokenizer, grid, done.step, done.samples)
        engine = open_engine(recipe, grid, ops)
        _restore(engine, start, out)
        _on_rank_0(_write_recipe, out, recipe, grid.world)
        with (
            Loader(sampler, recipe.data.workers, stop=steps) as loader,
            Saver(out, grid.world, ops, keep=recipe.checkpoint.keep) as saver,
            losses_told(world),
        ):
            phase.copies = _make_copies(engine)
            return _Run(engine, loader, saver, out, start, phase).train()


def _make_copies(engine: Engine) -> Copies | None:
    if not engine.recipe.checkpoint.copy_every:
        return None
    grid, fragments = engine.grid, engine.fragments(share=True)
    distance = grid.far_distance()
    return Copies(grid.world, engine.ops, fragments, engine.saved_kinds, distance)


def _on_rank_0(
    act: Callable[[Path, Recipe], None], out: Path, recipe: Recipe, world: Any
) -> None:
    """Changes the run folder; all ranks hear of it where that fails."""
    error: Exception | None = None
    if world.rank == 0:
        try:
            with file_work("writing", out):
                act(out, recipe)
        except OSError as problem:
            reason = f"cannot write the run folder {out}: {problem}"
            error = ConfigError([reason], title="the command")
    raise_together(error, world)


def _make_folder(out: Path, recipe: Recipe) -> None:
    out.mkdir(parents=True, exist_ok=True)
    remove_drafts(out)


def _write_recipe(out: Path, recipe: Recipe) -> None:
    # From here on the folder holds a run.
    (out / RECIPE).write_text(to_toml(recipe), encoding="utf-8")


def _restore(engine: Engine, start: Start, out: Path) -> None:
    """Gives the engine the state of the checkpoint, if there is one."""
    if start.manifest is None:
        return
    try:
        engine.restore(start.folder, start.manifest)
    except CheckpointError as error:
        raise with_offer(error, start.folder, out) from None


class _Run:
    """The state of a run between its steps.

    start   where it begins;  phase  what this attempt at it has
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        saver: Saver,
        out: Path,
        start: Start,
        phase: Phase,
    ) -> None:
        self.engine, self.loader, self.out = engine, loader, out
        self.sampler: Sampler = loader.sampler
        self.recipe = engine.recipe
        self.rank = engine.grid.world.rank
        self.start = start
        hours = self.recipe.train.max_hours
        self.until = phase.began + 3600 * hours if hours else None
        self.signals = phase.signals
        self.bubbles: list[float] = []
        self.step_s: list[float] = []
        r = self.recipe
        self.show = make_progress(
            r.log.progress, r.train.steps, r.log.every, self.rank, start.progress.step
        )
        self.stragglers = Stragglers(engine.grid, r.log.straggler)
        run = start.manifest.run if start.manifest else secrets.token_hex(8)
        run = engine.grid.world.broadcast_obj(run)
        self.saves = Saves(
            engine, self.sampler, saver, run, start.progress, self.show.say,
            phase.copies,
        )  # fmt: skip

    def train(self) -> int:
        """All steps, then the last evaluation and save."""
        began = time.perf_counter()
        peak = self.engine.ops.matmul_rate()
        step = self.start.progress.step
        # Signals stay with us until all is saved: ranks get them at different times.
        with self.signals as signals:
            try:
                entropy = self._introduce()
                with Metrics(
                    self.out, self.engine, peak, self.saves, step, self.rank == 0
                ) as metrics:
                    line = self._steps(metrics, signals)
                self._conclude(line, entropy, time.perf_counter() - began)
            finally:
                self.show.close()
        return STOPPED if line["stop"] else DONE

    def _steps(self, metrics: Metrics, signals: StopSignals) -> dict[str, Any]:
        """Runs until the last step or until a rank is asked to stop; the last line."""
        steps, every = self.recipe.train.steps, self.recipe.train.eval_every
        while True:
            result = self._advance(signals)
            if result is None:
                continue
            line = metrics.record(result, self.sampler.valid_tokens)
            self._name_stragglers(metrics.working_s, line)
            self.bubbles.append(result.bubble)
            self.step_s.append(line["seconds"])
            self.saves.step_ended(result)
            number, ends = self.engine.number, result.stop > 0
            check = self.recipe.train.check_every
            if check and number % check == 0:
                check_copies(self.engine)
            if ends:
                # Whoever wants the run to stop may not wait for the evaluation; a batch
                # that is open is left to the run that goes on. What is saved is not
                # done again, so its line is there before.
                metrics.write(line)
                self.saves.last()
            ends = ends or number == steps
            if ends or (every and number % every == 0):
                line |= self._evaluate()
                metrics.restart_clock()
            metrics.write(line, again=result.stop > 0)
            self.show.step(line)
            if ends:
                self.engine.drain()
                if not result.stop:
                    self.saves.last()
                return line | {"stop": result.stop}
            if self.saves.copy_if_due() | self.saves.if_due():
                metrics.restart_clock()

    def _name_stragglers(self, working_s: float, line: dict[str, Any]) -> None:
        """Says which ranks make the others wait, and adds them to the line."""
        slow = self.stragglers.note(working_s)
        if slow:
            line["stragglers"] = slow
        for text in self.stragglers.news(slow):
            self.show.say(text)

    def _advance(self, signals: StopSignals) -> StepResult | None:
        """Works on the next batch, or ends what was begun when there is none."""
        engine = self.engine
        if engine.begun == self.recipe.train.steps:
            return engine.drain()
        batches = self.loader.train_batches(engine.begun)
        late = self.until is not None and time.monotonic() > self.until
        return engine.step(
            batches,
            self.sampler.valid_tokens,
            stop=signals.asked or late,
            saved=self.saves.saver.ready,
        )

    def _evaluate(self) -> dict[str, float]:
        """Mean loss over the held-out samples, where there are any."""
        if not self.sampler.eval_count:
            return {}
        rounds = list(self.loader.eval_batches())
        return {
            "validation_loss": self.engine.evaluate(rounds, self.sampler.eval_tokens)
        }

    def _introduce(self) -> float:
        """Tells what is about to run; the unigram entropy of the training text."""
        say = self.show.say
        stream, model = self.sampler.stream, self.recipe.model
        weights = self.engine.weights()
        if self.rank != 0:
            return 0.0
        entropy = unigram_entropy(stream.train, model.vocab)
        grid, experts = self.engine.grid, self.recipe.experts
        taken = f", {experts.active} of {experts.count} experts a token"
        say(
            f"{model.family}: {weights:,} weights, "
            f"{model.layers} layers, width {model.width}, context {model.context}"
            f"{taken if experts.count else ''}"
        )
        ops = self.engine.ops
        parts = [grid.describe(), *_methods(self.engine), ops.precision]
        say(", ".join(filter(None, [*parts, ops.attention_method, grid.road])))
        say(
            f"{stream.source}: {stream.train.size:,} tokens to train on, "
            f"{self.sampler.eval_count:,} held-out samples, "
            f"unigram entropy {entropy:.4f} nats per token"
        )
        if self.start.folder:
            say(f"goes on from {self.start.folder}")
        known, there = self.start.progress.train_samples, stream.train_samples
        if known not in (0, there):
            say(f"note: an epoch has {there:,} samples, it had {known:,} before")
        for note in [*self.start.notes, *_notes(self.engine, self.sampler)]:
            say(note)
        return entropy

    def _conclude(self, line: dict[str, Any], entropy: float, seconds: float) -> None:
        """Writes summary.json and says how the run ended."""
        simulated = self.engine.simulate_measured()
        if simulated is None:
            return
        saves = self.saves.summary(statistics.median(self.step_s))
        facts = {
            "steps": line["step"],
            "began_at_step": self.start.progress.step,
            "stopped": bool(line["stop"]),
            "loss": line["loss"],
            "validation_loss": line.get("validation_loss"),
            "unigram_entropy": entropy,
            "tokens": line["tokens"],
            "seconds": seconds,
            "ranks": self.engine.grid.world.size,
            "bubble": statistics.mean(self.bubbles),
            "bubble_predicted": line["bubble_predicted"],
            "bubble_simulated": simulated.bubble,
            "saves": saves,
        }
        write_summary(self.out, self.recipe, facts)
        loss = facts["validation_loss"] or facts["loss"]
        kind = "validation loss" if facts["validation_loss"] else "loss"
        verb = "stopped" if facts["stopped"] else "done"
        waiting = ""
        if self.engine.grid.pp.size > 1:
            waiting = (
                f", bubble {facts['bubble']:.1%} (in theory "
                f"{facts['bubble_predicted']:.1%}, with the stages' times "
                f"{facts['bubble_simulated']:.1%})"
            )
        self.show.say(
            f"{verb} after {line['step']} steps, {seconds:.0f} s: {kind} {loss:.4f}, "
            f"unigram entropy {entropy:.4f} nats per token{waiting}; see {self.out}"
        )
        if saves.get("advised_every"):
            every, now = saves["advised_every"], self.recipe.checkpoint
            self.show.say(
                f"a save costs {saves['exposed_seconds']:.2f} s of the run: with a "
                f"failure every {now.failure_hours:g} hours, checkpoint.every = "
                f"{every} would lose the least time (it is {now.every})"
            )


def _methods(engine: Engine) -> list[str]:
    """How this run is laid out, besides its axes."""
    recipe, state = engine.recipe, engine.state
    methods = ["sequence parallel"] if recipe.parallel.sequence else []
    if engine.grid.cp.size > 1:
        cut = engine.sequence.cut
        inner = f" ({cut.heads} ranks exchange heads)" if cut.method == "usp" else ""
        methods.append(f"context {cut.method}{inner}")
    if engine.grid.pp.size > 1:
        blocks = ",".join(map(str, engine.block_counts))
        methods.append(f"schedule {engine.schedule.name} (blocks {blocks})")
    if state.shard:
        methods.append(f"ZeRO {state.stage} over {state.shard.size} ranks")
    if recipe.train.recompute != "none":
        methods.append(f"{recipe.train.recompute} recomputation")
    return methods


def _notes(engine: Engine, sampler: Sampler) -> list[str]:
    """What a person should know before the run goes on."""
    notes = [sampler.stream.note] if sampler.stream.note else []
    precision = engine.ops.precision
    if precision == "bf16" and engine.ops.on_host and (reason := bf16_obstacle()):
        notes.append(f"note: {reason}; products go through fp32, slowly")
    if precision == "fp16" and engine.ops.on_host:
        notes.append("note: CPUs have no fp16 products; they go through fp32, slowly")
    if engine.grid.crosses_nodes("tp"):
        notes.append("note: tensor-parallel groups cross nodes, which is slow")
    return notes
