"""mpipar bench context: attention over a shared sequence, by method."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpipar.cli.sizes import add_sizes

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    sizes = {
        "--length": (8192, "positions of the sequence"),
        "--heads": (4, "query heads"),
        "--kv-heads": (4, "key and value heads"),
        "--width": (64, "width of a head"),
    }
    add_sizes(parser, sizes)


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Measure; return the exit status."""
    from mpipar.bench.context import run_context

    run_context(
        world,
        length=args.length,
        heads=args.heads,
        kv_heads=args.kv_heads,
        width=args.width,
        rounds=args.rounds,
        json_path=args.json,
    )
    return 0
