"""mpipar bench peers: the same training in PyTorch and in mpipar, side by side."""

import argparse
import signal
import sys
from pathlib import Path

from mpipar.cli.launch import Launch
from mpipar.cli.recipe import add_recipe_arguments
from mpipar.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        metavar="N",
        help="timed steps of each contestant (default: %(default)s)",
    )
    parser.add_argument(
        "--peers",
        default="",
        metavar="NAME,...",
        help="contestants to run; all without it (the table lists them)",
    )
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PYTHON",
        help="the Python that has torch (default: this one)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every timing here as well"
    )


def run_outside(args: argparse.Namespace, launch: Launch) -> int:
    """Compare; return 1 where the losses show that the work differed.

    This process stays outside MPI, since it starts MPI jobs of its own.
    """
    if launch.variable:
        reason = (
            "bench peers starts its own MPI jobs: run it without a launcher, not "
            f"under {launch.name} ({launch.variable} is set)"
        )
        raise ConfigError([reason], title="the command")

    from mpipar.bench.peers import run_peers

    # End the workers too when a batch system ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run_peers(
        args.recipe,
        args.overrides,
        rounds=args.rounds,
        names=[name for name in args.peers.split(",") if name],
        python=args.torch_python,
        json_path=args.json,
    )
