"""Options of the bench commands that measure sizes of one's own."""

import argparse
from collections.abc import Mapping
from pathlib import Path


def add_sizes(
    parser: argparse.ArgumentParser, sizes: Mapping[str, tuple[int, str]]
) -> None:
    """Add an option for each size, with its default and what it is; rounds; --json."""
    rounds = {"--rounds": (5, "rounds to measure, after one to warm up")}
    for name, (value, text) in {**sizes, **rounds}.items():
        parser.add_argument(
            name, type=int, default=value, metavar="N", help=f"{text} (%(default)s)"
        )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every round here as well"
    )
