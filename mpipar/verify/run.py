"""Runs a layout and the serial model on the same batches in fp64 and compares them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.comm import raise_together
from mpipar.config import UNCUT, Recipe, replace, resolve
from mpipar.data import Sampler
from mpipar.engine import (
    Engine,
    StepResult,
    finite,
    load_vocabulary,
    make_sampler,
    open_engine,
    open_grid,
)
from mpipar.errors import ConfigError
from mpipar.grid import serial_grid
from mpipar.layers.parameter import Parameter
from mpipar.verify.compare import (
    Comparison,
    larger,
    relative,
    tensor_errors,
)
from mpipar.verify.gather import global_arrays

TOLERANCE = 1e-10

# The reference: an engine on one rank, and the samples of the whole global batch.
_Serial = tuple[Engine, Sampler]


@dataclass
class Verdict:
    """What the comparison found; `first` is the first difference over the tolerance."""

    layout: dict[str, Any]
    tolerance: float = TOLERANCE
    loss: float = 0.0
    grad_norm: float = 0.0
    gradients: Comparison = field(default_factory=Comparison)
    weights: Comparison = field(default_factory=Comparison)
    first: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """True where nothing differs by more than the tolerance."""
        return self.first is None

    def note(self, step: int, kind: str, name: str | None, error: float) -> None:
        """Takes in one error; a NaN counts as a difference."""
        if not error <= self.tolerance and self.first is None:
            self.first = {"step": step, "kind": kind, "name": name}

    def as_dict(self) -> dict[str, Any]:
        """The contents of `--json`."""
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "layout": self.layout,
            "loss": {"relative_error": finite(self.loss)},
            "grad_norm": {"relative_error": finite(self.grad_norm)},
            "gradients": self.gradients.as_dict(),
            "weights": self.weights.as_dict(),
            "first_difference": self.first,
        }


def run_verification(
    recipe: Recipe, world: Any, *, steps: int = 3, json_path: Path | None = None
) -> bool:
    """True where the layout computes what one rank computes; prints a table.

    Every step compares the loss, every gradient and the gradient norm, the last one
    also every weight; the learning rate is that of the recipe. Rank 0 runs the serial
    model on the whole global batch while the others wait, log.timeout_s for each rank.

    recipe   resolved for the size of world; it runs in fp64, whatever it says, and on
             CPUs unless it asks for "cuda"
    """
    if steps < 1:
        error = ConfigError(
            [f"--steps = {steps} must be at least 1"], title="the command"
        )
        error.agreed = True
        raise error
    patience = recipe.log.timeout_s * world.size
    is_cuda = recipe.train.device == "cuda"
    changes = {
        "train.precision": "fp64",
        "optimizer.rounding": "nearest",
        "train.device": "cuda" if is_cuda else "cpu",
        "train.graph": recipe.train.graph and is_cuda,
        "train.attention": "auto",
        "parallel.transport": recipe.parallel.transport if is_cuda else "auto",
        "log.timeout_s": patience,
    }
    recipe = resolve(replace(recipe, changes), world.size)
    grid, ops = open_grid(recipe, world)
    with grid:
        recipe, tokenizer = load_vocabulary(recipe, grid.world)
        sampler = make_sampler(recipe, tokenizer, grid)
        layout = open_engine(recipe, grid, ops)
        serial = _serial_engine(recipe, ops, sampler) if grid.world.rank == 0 else None
        verdict = Verdict(recipe.parallel.axes | {"sequence": recipe.parallel.sequence})
        for _ in range(steps + 1):
            _compare_step(steps, layout, sampler, serial, verdict)
        _compare_tensors(steps, "weights", layout, serial, verdict)
        error = None
        if serial is not None:
            report(verdict, grid.describe())
            error = _write(json_path, verdict)
        raise_together(error, grid.world)
        return grid.world.broadcast_obj(verdict.passed)


def _serial_engine(recipe: Recipe, ops: Any, sampler: Sampler) -> _Serial:
    """The same model on one rank, and samples that give it the whole batch."""
    uncut = dict(UNCUT)
    if recipe.parallel.schedule == "2bw":
        # Its updates come a batch later, on one rank as well.
        uncut["parallel.schedule"] = "2bw"
    recipe = resolve(replace(recipe, uncut), 1)
    whole = Sampler(
        sampler.stream,
        sampler.seed,
        sampler.global_batch,
        sampler.micro_batch,
    )
    return open_engine(recipe, serial_grid(), ops), whole


def _compare_step(
    steps: int,
    layout: Engine,
    sampler: Sampler,
    serial: _Serial | None,
    verdict: Verdict,
) -> None:
    """Takes one of `steps` in the layout and on one rank, and compares them."""
    result = _advance(layout, sampler, steps)
    exact = None if serial is None else _advance(*serial, steps)
    if result is None:
        return
    step = layout.number
    if serial is not None:
        loss = relative(result.loss, exact.loss)
        verdict.loss = larger(verdict.loss, loss)
        verdict.note(step, "loss", None, loss)
    _compare_tensors(step, "gradients", layout, serial, verdict)
    if serial is not None:
        norm = relative(result.grad_norm, exact.grad_norm)
        verdict.grad_norm = larger(verdict.grad_norm, norm)
        verdict.note(step, "grad_norm", None, norm)


def _advance(engine: Engine, sampler: Sampler, steps: int) -> StepResult | None:
    if engine.begun == steps:
        return engine.drain()
    return engine.step(sampler.train_batches(engine.begun), sampler.valid_tokens)


def _compare_tensors(
    step: int, kind: str, layout: Engine, serial: _Serial | None, verdict: Verdict
) -> None:
    """Gathers the layout's tensors and compares them on rank 0."""

    def select(p: Parameter) -> np.ndarray:
        return layout.ops.to_host(p.grad if kind == "gradients" else p.data)

    gathered = {}
    shown = "gradients" if kind == "gradients" else "values"
    grid, state = layout.grid, layout.state
    units = state.whole_units(shown)
    # A rank with fewer units than others has nothing at the end.
    for _ in range(int(grid.world.all_reduce(np.array([state.count]), "max")[0])):
        gathered |= global_arrays(next(units, []), select, grid, layout.ops.dtype)
    units.close()
    if serial is None:
        return
    exact = {p.name: select(p) for p in serial[0].state.parameters}
    comparison = getattr(verdict, kind)
    for name, error in tensor_errors(gathered, exact):
        comparison.add(name, error)
        verdict.note(step, kind, name, error)


def report(verdict: Verdict, layout: str) -> None:
    """Prints the verdict as a table of the worst tensors."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{layout}, against one rank in fp64")
    table.add_column("what")
    table.add_column("worst relative error", justify="right")
    table.add_column("where")
    table.add_row("loss", f"{verdict.loss:.2e}", "")
    table.add_row("gradient norm", f"{verdict.grad_norm:.2e}", "")
    for kind in ("gradients", "weights"):
        for name, error in getattr(verdict, kind).worst(5):
            table.add_row(kind, f"{error:.2e}", name)
    console.print(table)
    counts = f"{verdict.gradients.count} gradients, {verdict.weights.count} weights"
    if verdict.passed:
        console.print(f"PASSED: {counts} agree within {verdict.tolerance:.0e}")
    else:
        first = verdict.first
        console.print(
            f"FAILED: first difference in step {first['step']}: {first['kind']} "
            f"{first['name'] or ''}".rstrip()
        )


def _write(path: Path | None, verdict: Verdict) -> ConfigError | None:
    """Writes the verdict where a path is given; what went wrong, if anything."""
    if path is None:
        return None
    try:
        path.write_text(
            json.dumps(verdict.as_dict(), indent=2) + "\n", encoding="utf-8"
        )
    except OSError as problem:
        reason = f"cannot write --json {path}: {problem}"
        return ConfigError([reason], title="the command")
    return None
