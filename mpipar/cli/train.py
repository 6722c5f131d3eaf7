"""mpipar train: trains a recipe."""

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
        "--out",
        type=Path,
        metavar="DIR",
        help="the run's folder (default: runs/ and the recipe's name)",
    )
    parser.add_argument(
        "--resume",
        default="",
        metavar="auto|PATH",
        help="go on from the newest checkpoint in DIR, where there is one (auto), or "
        "from the one at PATH; the layout may differ",
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Train; return the exit status."""
    recipe = load_recipe(args, world)
    out = args.out or Path("runs") / Path(args.recipe).stem

    from mpipar.train import run_training

    return run_training(recipe, world, out, args.resume)
