"""mpipar bench checkpoint: how fast a state is saved and loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--gb",
        type=float,
        default=1.0,
        metavar="N",
        help="size of the state of all ranks in 10⁹ bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="write below this folder, where nothing stays (default: the current one)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="rounds to measure, after one to warm up (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every round here as well"
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Measure; return the exit status."""
    from mpipar.bench.checkpoint import run_checkpoint

    return run_checkpoint(
        world,
        gb=args.gb,
        folder=args.folder,
        rounds=args.rounds,
        json_path=args.json,
    )
