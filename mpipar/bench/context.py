"""How long attention over a shared sequence takes, by the method of sharing it."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.bench.cores import take_own_cores
from mpipar.bench.report import machine, write_together
from mpipar.bench.rounds import in_turns
from mpipar.comm import raise_together
from mpipar.config.context_rules import head_ranks, heads_fit
from mpipar.config.kinds import METHODS
from mpipar.errors import ConfigError
from mpipar.grid import Grid
from mpipar.layers.base import Step
from mpipar.layers.context import Core, Cut, Heads, make_core
from mpipar.ops import make_ops

REFERENCE = "ring"


def run_context(
    world: Any,
    *,
    length: int,
    heads: int,
    kv_heads: int,
    width: int,
    rounds: int,
    json_path: Path | None,
) -> None:
    """Times a forward and backward pass of one sequence by every method, in turns.

    All ranks of world share the sequence; each is bound to cores of its own where
    there are enough. Prints the median of each method and, as the median of ratios of
    the same round, how much faster than the contiguous ring it is.

    Raises   ConfigError on all ranks together
    """
    with Grid(world, {"cp": world.size}) as grid:
        raise_together(
            _complaint(length, heads, kv_heads, rounds, world.size), grid.world
        )
        take_own_cores(grid)
        cores = _cores(grid, heads, kv_heads)
        sizes = Heads(heads, kv_heads, width, width**-0.5)
        passes = {name: _Pass(core, cut, grid, length, sizes)
                  for name, (core, cut) in cores.items()}  # fmt: skip
        calls = {name: attention.seconds for name, attention in passes.items()}
        found = in_turns(calls, rounds)
        facts = _report(found, length, world.size) if world.rank == 0 else None
        write_together(json_path, facts, grid.world)


class _Pass:
    """One sequence's attention on this rank."""

    def __init__(
        self, core: Core, cut: Cut, grid: Grid, length: int, sizes: Heads
    ) -> None:
        self.core, self.grid, self.sizes = core, grid, sizes
        positions = cut.of_rank(length, grid.cp.rank)
        self.step = Step(positions=positions, samples=np.arange(1))
        rng = np.random.default_rng(grid.cp.rank)

        def draw(count: int) -> np.ndarray:
            shape = (1, len(positions), count, sizes.width)
            return rng.standard_normal(shape, np.float32)

        self.inputs = draw(sizes.queries), draw(sizes.keys), draw(sizes.keys)
        self.do = draw(sizes.queries)

    def seconds(self) -> float:
        """Of a forward and backward pass, on the slowest rank."""
        grads = tuple(np.zeros_like(x) for x in self.inputs)
        self.grid.world.barrier()
        began = time.perf_counter()
        common = self.step, self.sizes, _nothing_dropped
        o, saved = self.core.forward(*self.inputs, *common)
        inputs = None if self.core.keeps_inputs else self.inputs
        self.core.backward(self.do, inputs, o, saved, *common, grads)
        spent = np.array([time.perf_counter() - began])
        return float(self.grid.world.all_reduce(spent, "max")[0])


def _cores(grid: Grid, heads: int, kv_heads: int) -> dict[str, tuple[Core, Cut]]:
    """A core for each method that the heads allow."""
    n, made = grid.cp.size, {}
    ops = make_ops("cpu", "fp32", grid.node_rank)
    for method in METHODS:
        exchanging = head_ranks(method, n, 0, heads, kv_heads)
        if not heads_fit(exchanging, heads, kv_heads):
            continue
        cut = Cut(method, n, exchanging)
        made[method] = make_core(ops, cut, grid), cut
    return made


def _nothing_dropped(queries: np.ndarray, keys: np.ndarray, head: int) -> None:
    return None


def _complaint(
    length: int, heads: int, kv_heads: int, rounds: int, ranks: int
) -> ConfigError | None:
    wrong = []
    if length < 1 or length % (2 * ranks):
        wrong.append(f"--length = {length} must be a multiple of {2 * ranks}")
    if kv_heads < 1 or heads % kv_heads:
        wrong.append(f"--kv-heads = {kv_heads} must divide --heads = {heads}")
    if rounds < 1:
        wrong.append(f"--rounds = {rounds} must be at least 1")
    return ConfigError(wrong, "the command") if wrong else None


def _report(found: dict[str, list[float]], length: int, ranks: int) -> dict[str, Any]:
    """Print a table; the same and all rounds for --json."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"attention over {length:,} positions on {ranks} ranks, fp32")
    for head in ("method", "ms", "× ring"):
        table.add_column(head, justify="left" if head == "method" else "right")
    facts: dict[str, Any] = {"machine": machine(), "length": length, "ranks": ranks}
    for name, seconds in found.items():
        pairs = zip(found[REFERENCE], seconds, strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        median = statistics.median(seconds)
        table.add_row(name, f"{1000 * median:.0f}", f"{ratio:.2f}")
        facts[name] = {"seconds": seconds, "median_s": median, "times_ring": ratio}
    Console(width=100).print(table)
    return facts
