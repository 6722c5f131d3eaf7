"""mpipar bench step: where the time of a training step goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.cli.recipe import add_recipe_arguments, load_recipe

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps to time, after two to warm up (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every step here as well"
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Profile the steps; return the exit status."""
    recipe = load_recipe(args, world)

    from mpipar.bench.step import run_step

    run_step(recipe, world, steps=args.steps, json_path=args.json)
    return 0
