"""mpipar verify: proves that a layout computes what one rank computes."""

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
        default=3,
        metavar="N",
        help="optimizer steps to compare (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result here as well"
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Verify; return 0 when both agree and 1 when they differ."""
    recipe = load_recipe(args, world)

    from mpipar.verify import run_verification

    passed = run_verification(recipe, world, steps=args.steps, json_path=args.json)
    return 0 if passed else 1
