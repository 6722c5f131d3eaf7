"""One training run, from a resolved recipe to its run folder."""

import statistics
import time
from pathlib import Path
from typing import Any

from mpipar.checkpoint import save_weights
from mpipar.comm import raise_together
from mpipar.config import Recipe, to_toml
from mpipar.data import Loader, Sampler, unigram_entropy
from mpipar.engine import (
    Engine,
    StepResult,
    load_vocabulary,
    make_sampler,
    open_engine,
    open_grid,
)
from mpipar.errors import ConfigError
from mpipar.ops import bf16_obstacle
from mpipar.train.metrics import Metrics, write_summary
from mpipar.train.progress import Progress, make_progress
from mpipar.train.signals import StopSignals

DONE, STOPPED = 0, 3


def run_training(recipe: Recipe, world: Any, out: Path) -> int:
    """Trains `recipe` and writes `out`; the exit status, 0 or 3 (stopped by a signal).

    recipe   resolved for the size of world
    world    MPI communicator of all ranks
    out      the run folder, which must not hold a run yet
    Raises   ConfigError, DataError or CheckpointError on all ranks together
    """
    grid, ops = open_grid(recipe, world)
    with grid:
        recipe, tokenizer = load_vocabulary(recipe, grid.world)
        sampler = make_sampler(recipe, tokenizer, grid)
        _make_folder(out, recipe, grid.world)
        engine = open_engine(recipe, grid, ops)
        with Loader(sampler, recipe.data.workers, stop=recipe.train.steps) as loader:
            return _Run(engine, loader, out).train()


def _make_folder(out: Path, recipe: Recipe, world: Any) -> None:
    """Makes the run folder with its recipe on rank 0; agreed by all."""
    error: Exception | None = None
    if world.rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if (out / "recipe.toml").exists():
                reason = f"{out} already holds a run; choose another --out or remove it"
                error = ConfigError([reason], title="the command")
            else:
                (out / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        except OSError as problem:
            reason = f"cannot write the run folder {out}: {problem}"
            error = ConfigError([reason], title="the command")
    raise_together(error, world)


class _Run:
    """The state of a run between its steps."""

    def __init__(self, engine: Engine, loader: Loader, out: Path) -> None:
        self.engine, self.loader, self.out = engine, loader, out
        self.sampler: Sampler = loader.sampler
        self.recipe = engine.recipe
        self.rank = engine.grid.world.rank
        self.saved_at = -1
        self.bubbles: list[float] = []

    def train(self) -> int:
        """All steps, then the last evaluation and save."""
        r = self.recipe
        show = make_progress(r.log.progress, r.train.steps, r.log.every, self.rank)
        began = time.perf_counter()
        peak = self.engine.ops.matmul_rate()
        # Signals stay with us until all is saved: ranks get them at different times.
        with StopSignals() as signals:
            try:
                entropy = self._introduce(show)
                with Metrics(self.out, self.engine, peak, self.rank == 0) as metrics:
                    line = self._steps(show, metrics, signals)
                self._save(show)
                self._conclude(show, line, entropy, time.perf_counter() - began)
            finally:
                show.close()
        return STOPPED if line["stop"] else DONE

    def _steps(
        self, show: Progress, metrics: Metrics, signals: StopSignals
    ) -> dict[str, Any]:
        """Runs until the last step or until a rank is asked to stop; the last line."""
        steps, train = self.recipe.train.steps, self.recipe.train
        valid = self.sampler.valid_tokens
        stop = 0
        while True:
            result = self._advance(valid, stop > 0, signals)
            if result is None:
                continue
            line = metrics.record(result, valid)
            self.bubbles.append(result.bubble)
            number, stop = self.engine.number, stop + result.stop
            ends = number == steps or stop > 0 and number == self.engine.begun
            if ends and stop:
                # Whoever sent the signal may not wait for the evaluation.
                self._save(show)
            if ends or (train.eval_every and number % train.eval_every == 0):
                line |= self._evaluate()
                metrics.restart_clock()
            metrics.write(line)
            show.step(line)
            if ends:
                return line | {"stop": stop}
            every = self.recipe.checkpoint.every
            if every and number % every == 0:
                self._save(show)
                metrics.restart_clock()

    def _advance(
        self, valid: int, stopping: bool, signals: StopSignals
    ) -> StepResult | None:
        """Works on the next batch, or ends what was begun when there is none."""
        engine = self.engine
        if stopping or engine.begun == self.recipe.train.steps:
            return engine.drain()
        batches = self.loader.train_batches(engine.begun)
        return engine.step(batches, valid, stop=signals.asked)

    def _evaluate(self) -> dict[str, float]:
        """Mean loss over the held-out samples, where there are any."""
        if not self.sampler.eval_count:
            return {}
        rounds = list(self.loader.eval_batches())
        return {
            "validation_loss": self.engine.evaluate(rounds, self.sampler.eval_tokens)
        }

    def _save(self, show: Progress) -> None:
        number = self.engine.number
        if self.saved_at == number:
            return
        folder = save_weights(
            self.out,
            number,
            to_toml(self.recipe),
            self.engine.state.whole_units("values"),
            self.engine.grid,
            self.engine.ops,
        )
        self.saved_at = number
        show.say(f"saved {folder}")

    def _introduce(self, show: Progress) -> float:
        """Tells what is about to run; the unigram entropy of the training text."""
        stream, model = self.sampler.stream, self.recipe.model
        weights = self.engine.weights()
        if self.rank != 0:
            return 0.0
        entropy = unigram_entropy(stream.train, model.vocab)
        grid = self.engine.grid
        show.say(
            f"{model.family}: {weights:,} weights, "
            f"{model.layers} layers, width {model.width}, context {model.context}"
        )
        parts = [grid.describe(), *_methods(self.engine), self.engine.ops.precision]
        show.say(", ".join(parts))
        show.say(
            f"{stream.source}: {stream.train.size:,} tokens to train on, "
            f"{self.sampler.eval_count:,} held-out samples, "
            f"unigram entropy {entropy:.4f} nats per token"
        )
        for note in _notes(self.engine, self.sampler):
            show.say(note)
        return entropy

    def _conclude(
        self, show: Progress, line: dict[str, Any], entropy: float, seconds: float
    ) -> None:
        """Writes summary.json and says how the run ended."""
        simulated = self.engine.simulate_measured()
        if simulated is None:
            return
        facts = {
            "steps": line["step"],
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
        show.say(
            f"{verb} after {line['step']} steps, {seconds:.0f} s: {kind} {loss:.4f}, "
            f"unigram entropy {entropy:.4f} nats per token{waiting}; see {self.out}"
        )


def _methods(engine: Engine) -> list[str]:
    """How this run is laid out, besides its axes."""
    recipe, state = engine.recipe, engine.state
    methods = ["sequence parallel"] if recipe.parallel.sequence else []
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
