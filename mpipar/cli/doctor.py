"""mpipar doctor: tells what is here, what is wrong, and what to do."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.cli.json_file import write_json
from mpipar.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI
    from rich.table import Table

    from mpipar.cli.finding import Finding

# The doctor reports a broken launch, so it is not refused for it.
ALONE = True

_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}
_WIDTHS = (4, 8)  # of states and names, so that two tables look like one
_LOST = "A rank has stopped, or the network does not carry its messages."
# How long ranks may take to meet, file systems included, and messages of a pair
_LIMIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where runs shall write, to be tried out (default: the current folder)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the findings here as well"
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Print the findings on rank 0; return 1 when something is bad."""
    from mpipar.cli.facts import collect
    from mpipar.cli.findings import judge, judge_sharing
    from mpipar.cli.folder import judge_folder, try_folder
    from mpipar.cli.gpus import try_transports
    from mpipar.cli.launch import read_launch
    from mpipar.cli.links import judge_links, measure, table
    from mpipar.cli.patience import Patience

    launch = read_launch(os.environ)
    speaks = world.rank == 0 and launch.speaks
    own, error, bad = collect(world.size), None, False
    with Patience(world, own.host, _LIMIT_S) as patience:
        patience.begin("the ranks do not meet", _LOST, world.rank == 0)
        facts, sharing = world.gather(own), world.gather(_shares_memory(world))
        transport = try_transports(world, own.gpus)
        patience.begin("the ranks do not meet again", _LOST, world.rank == 0)
        trials = try_folder(world, own.host, args.out)
        findings = []
        if speaks:
            findings += [*judge(facts, launch), judge_sharing(sharing)]
            findings += [transport] if transport else []
            findings += judge_folder(trials, own.file_locking)
            _show(findings)
        links = measure(world, own.host, patience)
        if speaks:
            found = judge_links(links)
            _show(found, table(links))
            findings += found
            bad = any(finding.state == "bad" for finding in findings)
            try:
                write_json(args.json, [asdict(finding) for finding in findings])
            except ConfigError as problem:
                error = problem
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


def _show(findings: Sequence[Finding], below: Table | None = None) -> None:
    """Print a table of findings, and another one below them."""
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, show_header=False, pad_edge=False)
    for width in _WIDTHS:
        rows.add_column(min_width=width)
    for finding in findings:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="italic")
        state = Text(finding.state, style=_COLOURS[finding.state])
        rows.add_row(state, finding.name, Group(text, below) if below else text)
        below = None
    if findings:
        Console(highlight=False).print(rows)
        sys.stdout.flush()
