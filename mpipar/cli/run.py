"""mpipar run: starts a training job, and starts it again when it fails."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from mpipar.errors import ConfigError

if TYPE_CHECKING:
    from mpipar.cli.launch import Launch

# What follows after "--" is another command
TAKES_REST = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.usage = (
        "%(prog)s [--restarts N] [--without-progress N] -- mpiexec -n 4 mpipar train "
        "RECIPE --out DIR ..."
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        metavar="N",
        help="how often the job is started again at most (default: %(default)s)",
    )
    parser.add_argument(
        "--without-progress",
        type=int,
        default=3,
        metavar="N",
        help="failures in a row without a new checkpoint after which it is given up "
        "(default: %(default)s)",
    )


def run_outside(args: argparse.Namespace, launch: Launch) -> int:
    """Supervise the job; return its last exit status."""
    wrong = []
    if launch.size not in (None, 1):
        wrong.append(
            "mpipar run starts a launcher, it is not started by one: mpipar run -- "
            "mpiexec ..."
        )
    if args.restarts < 0:
        wrong.append(f"--restarts = {args.restarts} must be at least 0")
    if args.without_progress < 1:
        wrong.append(f"--without-progress = {args.without_progress} must be at least 1")
    if not args.rest:
        wrong.append("the command to run is missing: mpipar run -- mpiexec -n 4 ...")
    if wrong:
        raise ConfigError(wrong, title="the command")

    from mpipar.cli.supervise import supervise

    return supervise(
        args.rest,
        restarts=args.restarts,
        without_progress=args.without_progress,
        say=lambda text: print(f"mpipar run: {text}", file=sys.stderr, flush=True),
    )
