"""mpipar generate: continues a prompt with a trained model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.cli.recipe import add_overrides

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint or run folder"
    )
    add_overrides(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="new tokens (%(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token each time (%(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens; 0 = from all (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the draws (%(default)s)"
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Print the prompt and its continuation; return the exit status."""
    from mpipar.generate import run_generation

    # A terminal that cannot show a character gets "?" for it, not a traceback.
    sys.stdout.reconfigure(errors="replace")

    run_generation(
        args.checkpoint,
        world,
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        overrides=args.overrides,
    )
    return 0
