"""What a mixture of experts costs: beside dense work of as many FLOPs on one rank, and
by how ranks share the experts on several."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpipar.bench.cores import take_own_cores
from mpipar.bench.expert_layer import DenseWork, MixtureWork
from mpipar.bench.expert_layouts import HEAD, Training, recipes
from mpipar.bench.report import machine, write_together
from mpipar.bench.rounds import in_turns
from mpipar.comm import raise_together
from mpipar.config import Experts
from mpipar.errors import ConfigError
from mpipar.grid import Grid

_MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of what it is given.

    tokens   of a pass, over all ranks
    experts, active   of a block, and those that a token takes
    width, ffn   of the stream, and inside of an expert
    """

    tokens: int
    experts: int
    active: int
    width: int
    ffn: int


def run_experts(
    world: Any, sizes: Sizes, *, rounds: int, json_path: Path | None
) -> None:
    """Times contestants in turns and prints medians, and medians of ratios of a round.

    On one rank forward and backward of a mixture and of one MLP that as many rows go
    through as choose experts; on more ranks whole steps of a small model: every rank
    has all experts, or its share of them, without and with overlap.

    Raises   ConfigError on all ranks together
    """
    with Grid(world, {"dp": world.size}) as grid:
        raise_together(_complaint(sizes, rounds, world.size), grid.world)
        take_own_cores(grid)
        if world.size == 1:
            facts = _beside_dense(sizes, rounds)
        else:
            facts = _by_layout(world, sizes, rounds)
        if world.rank == 0:
            _show(facts)
            facts = {"machine": machine()} | facts
        write_together(json_path, facts if world.rank == 0 else None, grid.world)


def _beside_dense(sizes: Sizes, rounds: int) -> dict[str, Any]:
    experts = Experts(count=sizes.experts, active=sizes.active, ffn=sizes.ffn)
    shape = sizes.tokens, sizes.width
    mixture, dense = MixtureWork(experts, *shape), DenseWork(experts, *shape)
    found = in_turns({"dense": dense.seconds, "mixture": mixture.seconds}, rounds)
    outside = mixture.outside[-rounds:]
    shares = [o / s for o, s in zip(outside, found["mixture"], strict=True)]
    rows = _rows(found, "dense")
    rows["mixture"]["outside_experts"] = statistics.median(shares)
    return vars(sizes) | {"ranks": 1, "reference": "dense", "rows": rows}


def _by_layout(world: Any, sizes: Sizes, rounds: int) -> dict[str, Any]:
    works = {}
    try:
        for name, recipe in recipes(sizes, world.size).items():
            works[name] = Training(recipe, world)
        calls = {name: work.seconds for name, work in works.items()}
        rows = _rows(in_turns(calls, rounds), "whole")
        for name, work in works.items():
            rows[name]["bytes"] = work.held()
    finally:
        for work in works.values():
            work.close()
    return vars(sizes) | {"ranks": world.size, "reference": "whole", "rows": rows}


def _rows(found: Mapping[str, list[float]], reference: str) -> dict[str, Any]:
    """Median seconds, and the median of how often those of the reference they are."""
    rows = {}
    for name, seconds in found.items():
        pairs = zip(seconds, found[reference], strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        median = statistics.median(seconds)
        rows[name] = {"seconds": seconds, "median_s": median, "ratio": ratio}
    return rows


def _show(facts: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    ranks = "one rank" if facts["ranks"] == 1 else f"{facts['ranks']} ranks"
    table = Table(
        title=f"{facts['active']} of {facts['experts']} experts, {facts['tokens']:,} "
        f"tokens of width {facts['width']} on {ranks}, fp32"
    )
    last = "outside experts" if facts["ranks"] == 1 else "state MiB a rank"
    for head in ("work", "ms", f"× {facts['reference']}", last):
        table.add_column(head, justify="left" if head == "work" else "right")
    for name, row in facts["rows"].items():
        cell = "-"
        if "outside_experts" in row:
            cell = f"{row['outside_experts']:.1%}"
        elif "bytes" in row:
            cell = f"{max(row['bytes']) / _MIB:.1f}"
        ms, ratio = 1000 * row["median_s"], row["ratio"]
        table.add_row(name, f"{ms:.1f}", f"{ratio:.3f}", cell)
    Console(width=100).print(table)


def _complaint(sizes: Sizes, rounds: int, ranks: int) -> ConfigError | None:
    wrong = []
    if sizes.tokens < 1 or sizes.tokens % ranks:
        wrong.append(f"--tokens = {sizes.tokens} must be a multiple of {ranks}, ranks")
    if sizes.experts < 1 or sizes.experts % ranks:
        wrong.append(
            f"--experts = {sizes.experts} must be a multiple of {ranks}, ranks"
        )
    if not 2 <= sizes.active <= sizes.experts:
        text = f"must be at least 2 and at most --experts = {sizes.experts}"
        wrong.append(f"--active = {sizes.active} {text}")
    if sizes.width < 1 or sizes.width % HEAD:
        wrong.append(f"--width = {sizes.width} must be a multiple of {HEAD}")
    if sizes.ffn < 1:
        wrong.append(f"--ffn = {sizes.ffn} must be at least 1")
    if rounds < 1:
        wrong.append(f"--rounds = {rounds} must be at least 1")
    return ConfigError(wrong, "the command") if wrong else None
