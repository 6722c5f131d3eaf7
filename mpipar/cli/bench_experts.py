"""mpipar bench experts: a mixture of experts beside dense work, and its layouts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpipar.cli.sizes import add_sizes

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    sizes = {
        "--tokens": (4096, "tokens of a pass, over all ranks"),
        "--experts": (8, "experts"),
        "--active": (2, "experts that a token takes"),
        "--width": (512, "width of the residual stream"),
        "--ffn": (1024, "inner width of an expert"),
    }
    add_sizes(parser, sizes)


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Measure; return the exit status."""
    from mpipar.bench.experts import Sizes, run_experts

    sizes = Sizes(args.tokens, args.experts, args.active, args.width, args.ffn)
    run_experts(world, sizes, rounds=args.rounds, json_path=args.json)
    return 0
