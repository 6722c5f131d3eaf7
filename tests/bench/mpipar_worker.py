"""models/small.toml in mpipar, on the ranks of its launcher; overrides as arguments."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from turns import serve

from mpipar.config import find_recipe, read_recipe
from mpipar.data import Batch
from mpipar.engine import Engine, open_grid


def main() -> None:
    """Serves training steps on the same tokens in every layout."""
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    world = MPI.COMM_WORLD
    text = find_recipe("small").read_text()
    same = ["optimizer.warmup=0", "optimizer.schedule=constant"]
    recipe = read_recipe(text, [*same, *overrides], ranks=world.size)
    grid, ops = open_grid(recipe, world)
    engine = Engine(recipe, grid, ops)
    tokens, labels = np.random.default_rng(0).integers(0, 256, (2, 16, 256))
    own = 16 // grid.dp.size
    part = slice(grid.dp.rank * own, (grid.dp.rank + 1) * own)
    batch = Batch(tokens[part], labels[part], np.arange(16)[part])
    serve(folder, world.rank, lambda: engine.step([batch], tokens.size).loss)
    grid.close()


if __name__ == "__main__":
    main()
