"""mpipar bench collectives: sums and gathers, at once and over nodes in turn."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpipar.cli.sizes import add_sizes

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_sizes(parser, {"--items": (1 << 20, "items of the whole array")})


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Measure; return the exit status."""
    from mpipar.bench.collectives import run_collectives

    run_collectives(world, items=args.items, rounds=args.rounds, json_path=args.json)
    return 0
