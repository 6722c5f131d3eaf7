"""Reads the recipe of a command once and gives every rank the same."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpipar.config import Recipe


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RECIPE and the key=value overrides."""
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a TOML file, or a preset such as tiny"
    )
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the key=value overrides."""
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="change a field of the recipe, such as parallel.tensor=2",
    )


def load_recipe(args: argparse.Namespace, world: MPI.Comm) -> Recipe:
    """Read, check and resolve the recipe for this number of ranks. Collective.

    Rank 0 reads the file and sends the text, so that no rank sees another version.
    Raises ConfigError on all ranks together.
    """
    from mpipar.config import read_recipe

    text, folder, violations = world.bcast(
        _read(args.recipe) if world.rank == 0 else None
    )
    try:
        if violations:
            raise ConfigError(violations, title="the command")
        return read_recipe(text, args.overrides, folder, ranks=world.size)
    except ConfigError as wrong:
        # Every rank judges the same text by the same rules.
        wrong.agreed = True
        raise


def _read(name: str) -> tuple[str, Path | None, list[str]]:
    """Text and folder of the recipe, or why there is none."""
    from mpipar.config import find_recipe

    try:
        path = find_recipe(name)
        return path.read_text(encoding="utf-8"), path.parent, []
    except ConfigError as error:
        return "", None, error.violations
    except (OSError, UnicodeError) as error:
        return "", None, [f"recipe {name} cannot be read: {error}"]
