"""mpipar bench serve: a worker of bench peers, which makes steps when told to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.cli.recipe import add_recipe_arguments, load_recipe
from mpipar.errors import DeviceError

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="holds the pipes"
    )
    parser.add_argument(
        "--cores", required=True, metavar="N,...", help="cores that may be used"
    )


def run(args: argparse.Namespace, world: MPI.Comm) -> int:
    """Serve steps until the orders end; return the exit status."""
    from mpipar.bench.turns import Turns
    from mpipar.cli.world import mpi_library

    with Turns(args.folder, world.rank, world.size, args.cores) as turns:
        recipe = load_recipe(args, world)

        # Only now, since NumPy's threads keep to the cores of the one that loads it.
        import numpy as np

        from mpipar.bench.workload import Workload
        from mpipar.engine import open_grid
        from mpipar.ops import bf16_obstacle

        grid, ops = open_grid(recipe, world)
        with grid:
            slow = ops.precision == "bf16" and ops.on_host
            if slow and (reason := bf16_obstacle()):
                raise DeviceError(reason)
            threads = int(os.environ["OMP_NUM_THREADS"])
            facts = {"mpi": mpi_library(), "numpy": np.__version__, "threads": threads}
            turns.serve(Workload(recipe, grid, ops).step, facts)
    return 0
