"""Trains two steps on all ranks and prints what memory they hold: bytes by the formula,
and the operating system's proportional set size (shared pages are counted once) without
that of files, which whoever else runs Python shares.

    mpiexec -n 2 python -m parity.resident SECTION.FIELD=VALUE ...
"""

import json
import sys
from pathlib import Path

from mpi4py import MPI
from parity.build import layout_engine, make_batch, make_recipe, take_step


def resident() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return 1024 * sum(int(x.split()[1]) for x in lines if x.startswith(kinds))


def main(words: list[str]) -> None:
    world = MPI.COMM_WORLD
    recipe = make_recipe(world.size, *words)
    with layout_engine(recipe, world) as engine:
        for step in range(2):
            take_step(engine, make_batch(recipe, step))
        world.barrier()
        found = world.gather((sum(engine.predicted_memory().values()), resident()))
        if world.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
