"""Where the time of a training step goes, and how near it is to the machine's limit."""

import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpipar.bench.clock import CATEGORIES, OpsClock
from mpipar.bench.report import machine, write_together
from mpipar.bench.workload import Workload, check_vocabulary
from mpipar.config import Recipe
from mpipar.engine import open_grid
from mpipar.errors import ConfigError

WARM_UP = 2
COMMUNICATION, WAITING, PYTHON = "communication", "waiting", "Python and the rest"


@dataclass(frozen=True)
class Profile:
    """One rank's steps.

    steps       seconds by category, of every step; they add up to the step's time
    faults      minor page faults of every step
    flops       of a step, by formula;  rate  FLOP/s of a matrix product, measured here
    peak_bytes  largest resident memory of the process
    """

    steps: list[dict[str, float]]
    faults: list[int]
    flops: int
    rate: float
    peak_bytes: int


@dataclass(frozen=True)
class Summary:
    """The median step, as the mean over ranks.

    seconds  by category;  step_s  their sum
    limit_s  step's FLOPs over the measured rate, on the rank where that takes longest
    faults   minor page faults of a step, median over steps, sum over ranks
    """

    seconds: dict[str, float]
    step_s: float
    flops: int
    rate: float
    limit_s: float
    faults: int
    fault_bytes: int
    peak_bytes: int

    @property
    def closeness(self) -> float:
        """The limit as a share of the step's time."""
        return self.limit_s / self.step_s


def run_step(
    recipe: Recipe, world: Any, *, steps: int = 5, json_path: Path | None = None
) -> None:
    """Profile steps on random tokens; rank 0 prints the table. Collective.

    recipe   resolved for the size of world
    Raises   ConfigError on all ranks together
    """
    if steps < 1:
        reason = f"--steps = {steps} must be at least 1"
        error = ConfigError([reason], title="the command")
        error.agreed = True
        raise error
    check_vocabulary(recipe)
    grid, ops = open_grid(recipe, world)
    with grid:
        grid.world.barrier()
        rate = ops.matmul_rate()
        clock = OpsClock(ops)
        profile = _profile(Workload(recipe, grid, ops), clock, rate, steps)
        profiles = grid.world.gather_obj(profile)
        facts = None
        if grid.world.rank == 0:
            summary = summarize(profiles)
            show(summary, f"{grid.describe()}, {ops.precision}, median step")
            facts = _facts(recipe, summary, profiles)
        write_together(json_path, facts, grid.world)


def _profile(work: Workload, clock: OpsClock, rate: float, steps: int) -> Profile:
    engine = work.engine
    for _ in range(WARM_UP):
        work.step()
    taken, faults = [], []
    for _ in range(steps):
        clock.take()
        mark, before = engine.grid.counters.snapshot(), _faults()
        begin = time.perf_counter()
        work.step()
        whole = time.perf_counter() - begin
        faults.append(_faults() - before)
        taken.append(_split(whole, clock.take(), engine.grid.counters.since(mark)))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Profile(taken, faults, engine.step_flops(), rate, usage.ru_maxrss * 1024)


def _split(
    whole: float, array_work: dict[str, float], moved: dict[str, dict[str, Any]]
) -> dict[str, float]:
    """A step's seconds by category; what is left over is Python's."""
    tallies = [tally for axis in moved.values() for tally in axis.values()]
    waiting = sum(tally["wait"] for tally in tallies)
    moving = sum(tally["seconds"] for tally in tallies) - waiting
    parts = array_work | {COMMUNICATION: moving, WAITING: waiting}
    return parts | {PYTHON: whole - sum(parts.values())}


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def summarize(profiles: list[Profile]) -> Summary:
    """The step of median length, by the mean over ranks."""
    means = [
        {kind: statistics.fmean(step[kind] for step in ranks) for kind in ranks[0]}
        for ranks in zip(*(p.steps for p in profiles), strict=True)
    ]
    median = sorted(means, key=lambda step: sum(step.values()))[len(means) // 2]
    faults = sum(int(statistics.median(p.faults)) for p in profiles)
    return Summary(
        seconds=median,
        step_s=sum(median.values()),
        flops=sum(p.flops for p in profiles),
        rate=sum(p.rate for p in profiles),
        limit_s=max(p.flops / p.rate for p in profiles),
        faults=faults,
        fault_bytes=faults * resource.getpagesize(),
        peak_bytes=sum(p.peak_bytes for p in profiles),
    )


def show(s: Summary, title: str) -> None:
    """Print the shares as a table, and the limit below it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("where")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for kind in (*CATEGORIES, COMMUNICATION, WAITING, PYTHON):
        seconds = s.seconds[kind]
        table.add_row(kind, f"{seconds * 1e3:.2f}", f"{seconds / s.step_s:.1%}")
    table.add_row("step", f"{s.step_s * 1e3:.2f}", "100.0%")
    console = Console(highlight=False)
    console.print(title)
    console.print(table)
    console.print(
        f"{s.flops / 1e9:.2f} GFLOP a step by formula; matrix products run at "
        f"{s.rate / 1e9:.1f} GFLOP/s here, so that the limit is "
        f"{s.limit_s * 1e3:.2f} ms: the step reaches {s.closeness:.1%} of it\n"
        f"{s.faults} minor page faults a step ({s.fault_bytes / 2**20:.1f} MiB); "
        f"peak resident memory {s.peak_bytes / 2**20:.0f} MiB; sums over all ranks",
        soft_wrap=True,
    )


def _facts(recipe: Recipe, s: Summary, profiles: list[Profile]) -> dict[str, Any]:
    """Everything, for --json."""
    facts = vars(s) | {"closeness": s.closeness, "machine": machine()}
    return facts | {"recipe": recipe.model_dump(), "ranks": [vars(p) for p in profiles]}
