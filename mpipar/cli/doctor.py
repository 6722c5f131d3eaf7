"""mpipar doctor: tells what is here, what is wrong, and what to do."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpipar.cli.findings import Finding

# The doctor reports a broken launch, so it is not refused for it.
ALONE = True

_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the findings here as well"
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Print the findings on rank 0; return 1 when something is bad."""
    from mpipar.cli.facts import collect
    from mpipar.cli.findings import judge, judge_sharing
    from mpipar.cli.launch import read_launch
    from mpipar.cli.links import judge_links, measure

    error, bad = None, False
    own = collect(world.size)
    facts, links = world.gather(own), measure(world, own.host)
    sharing = world.gather(_shares_memory(world))
    launch = read_launch(os.environ)
    if world.rank == 0 and launch.speaks:
        findings = [*judge(facts, launch), judge_sharing(sharing)]
        findings += judge_links(links)
        _show(findings)
        error = _write(args.json, findings)
        bad = any(finding.state == "bad" for finding in findings)
    error, bad = world.bcast((error, bad))
    if error is not None:
        error.agreed = True
        raise error
    return int(bad)


def _shares_memory(world: MPI.Comm) -> bool:
    """Try what gradients will do: share an array with the other ranks of the node."""
    import numpy as np

    from mpipar.comm import mpi
    from mpipar.comm.shared import share

    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    shares = share(node, 1, np.dtype("u1")) is not None
    node.Free()
    return shares


def _write(path: Path | None, findings: list[Finding]) -> ConfigError | None:
    """Write the findings where a path is given; return what went wrong, if anything."""
    if path is None:
        return None
    try:
        path.write_text(json.dumps([asdict(f) for f in findings], indent=2) + "\n")
    except OSError as problem:
        return ConfigError([f"cannot write --json {path}: {problem}"], "the command")
    return None


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="italic")
        state = Text(finding.state, style=_COLOURS[finding.state])
        table.add_row(state, finding.name, text)
    Console(highlight=False).print(table)
