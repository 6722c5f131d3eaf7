"""Steps of one small model whose experts lie on the ranks in several ways."""

import time
from typing import Any

import numpy as np

from mpipar.bench.workload import CONSTANT_RATE, Workload
from mpipar.config import Recipe, read_recipe
from mpipar.engine import open_grid

LONGEST, LAYERS, HEAD = 256, 2, 64


class Training:
    """Steps of a recipe. Making it, `seconds` and `close` are collective.

    recipe   resolved for the size of world
    """

    def __init__(self, recipe: Recipe, world: Any) -> None:
        self.grid, ops = open_grid(recipe, world)
        self.work = Workload(recipe, self.grid, ops)

    def seconds(self) -> float:
        """Of a step, on the slowest rank."""
        self.grid.world.barrier()
        began = time.perf_counter()
        self.work.step()
        spent = np.array([time.perf_counter() - began])
        return float(self.grid.world.all_reduce(spent, "max")[0])

    def held(self) -> list[int]:
        """Bytes of weights, gradients and moments, of each rank. Collective."""
        engine = self.work.engine
        own = engine.optimizer.m.nbytes + engine.optimizer.v.nbytes
        own += sum(sum(state.held().values()) for state in engine.states)
        return self.grid.world.all_gather(np.array([own])).tolist()

    def close(self) -> None:
        """Gives up the communicators."""
        self.grid.close()


def recipes(sizes: Any, ranks: int) -> dict[str, Recipe]:
    """Every rank has all experts, or its share of them, without and with overlap."""
    context = min(LONGEST, sizes.tokens // ranks)
    context = next(n for n in range(context, 0, -1) if sizes.tokens % (n * ranks) == 0)
    fields = {
        "model.family": "llama", "model.layers": LAYERS, "model.width": sizes.width,
        "model.heads": sizes.width // HEAD, "model.context": context,
        "model.vocab": 256, "model.ffn": sizes.ffn, "experts.count": sizes.experts,
        "experts.active": sizes.active, "train.device": "cpu",
        "train.global_batch": sizes.tokens // context,
    }  # fmt: skip
    given = [f"{key}={value}" for key, value in fields.items()]
    given += CONSTANT_RATE

    def made(*more: str) -> Recipe:
        return read_recipe("", [*given, *more], ranks=ranks)

    shared = f"parallel.expert={ranks}"
    return {
        "whole": made(),
        "shared": made(shared),
        "overlap": made(shared, "parallel.expert_overlap=true"),
    }
