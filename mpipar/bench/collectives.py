"""How long sums and gathers take: over all ranks at once, and over nodes in turn."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.bench.cores import take_own_cores
from mpipar.bench.report import machine, write_together
from mpipar.bench.rounds import in_turns
from mpipar.comm import Communicator, raise_together
from mpipar.errors import ConfigError
from mpipar.grid import Grid
from mpipar.ops.half import BF16

_TYPES = {"fp32": np.dtype(np.float32), "bf16": BF16}
_WAYS = {"at once": False, "over nodes": True}


def run_collectives(
    world: Any, *, items: int, rounds: int, json_path: Path | None
) -> None:
    """Times the sums and gathers of data parallelism on arrays of `items`, in turns.

    Prints medians, the bytes that a rank moves in a second, and how much longer the way
    at once takes, as the median of ratios of the same round.

    Raises   ConfigError on all ranks together
    """
    sizes = {"dp": world.size}
    with Grid(world, sizes, hierarchical=False) as flat, Grid(world, sizes) as grid:
        raise_together(_complaint(items, rounds, world.size), grid.world)
        take_own_cores(grid)
        found = {}
        for name, dtype in _TYPES.items():
            calls = {
                (op, way): partial(_seconds, call, grid.world)
                for way, axis in zip(_WAYS, (flat.dp, grid.dp), strict=True)
                for op, call in _operations(axis, items, dtype).items()
            }
            for (op, way), seconds in in_turns(calls, rounds).items():
                found[name, op, way] = seconds
        facts = _report(found, items, grid) if world.rank == 0 else None
        write_together(json_path, facts, grid.world)


def _operations(
    axis: Communicator, items: int, dtype: np.dtype
) -> dict[str, Callable[[], Any]]:
    """What is timed: as gradients and weights travel, so nonblocking."""
    x, own = np.zeros(items, dtype), np.zeros(items // axis.size, dtype)
    out = np.empty(items, dtype)
    return {
        "all_reduce": lambda: axis.all_reduce_start(x).wait(),
        "reduce_scatter": lambda: axis.reduce_scatter_start(x).wait(),
        "all_gather": lambda: axis.all_gather_start(own, out=out).wait(),
    }


def _seconds(call: Callable[[], Any], world: Any) -> float:
    """Of a call, on the slowest rank."""
    world.barrier()
    began = time.perf_counter()
    call()
    spent = np.array([time.perf_counter() - began])
    return float(world.all_reduce(spent, "max")[0])


def _complaint(items: int, rounds: int, ranks: int) -> ConfigError | None:
    wrong = []
    if ranks < 2:
        wrong.append("1 rank has nothing to sum; start at least 2, as mpiexec -n 2")
    if items < 1 or items % ranks:
        wrong.append(f"--items = {items} must be a multiple of {ranks}")
    if rounds < 1:
        wrong.append(f"--rounds = {rounds} must be at least 1")
    return ConfigError(wrong, "the command") if wrong else None


def _report(
    found: dict[tuple[str, str, str], list[float]], items: int, grid: Grid
) -> dict[str, Any]:
    """Print a table; the same and all rounds for --json."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"arrays of {items:,} items, {grid.describe()}")
    for head in ("type", "operation", "way", "ms", "GB/s", "× at once"):
        table.add_column(head, justify="left" if head[0] in "tow" else "right")
    rows = []
    for (name, op, way), seconds in found.items():
        first = found[name, op, next(iter(_WAYS))]
        ratio = statistics.median(a / b for a, b in zip(first, seconds, strict=True))
        median = statistics.median(seconds)
        turns = 2 if op == "all_reduce" else 1
        moved = turns * items * _TYPES[name].itemsize * (grid.size - 1) / grid.size
        cells = f"{1e3 * median:.2f}", f"{moved / median / 1e9:.2f}", f"{ratio:.2f}"
        table.add_row(name, op, way, *cells)
        rows.append({"type": name, "operation": op, "way": way, "seconds": seconds,
                     "median_s": median, "times_at_once": ratio})  # fmt: skip
    Console(width=100).print(table)
    facts = {"machine": machine(), "items": items, "ranks": grid.size}
    return facts | {"rows": rows}
