"""An engine and the batch of random tokens that all its steps repeat."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.config import Recipe
from mpipar.data import Batch
from mpipar.engine import open_engine
from mpipar.errors import ConfigError
from mpipar.grid import serial_grid
from mpipar.models import build_model
from mpipar.ops import Ops

# A step then costs and computes the same whenever it is made.
CONSTANT_RATE = ("optimizer.warmup=0", "optimizer.schedule=constant")


class Workload:
    """Steps of a recipe on this rank's part of one global batch. No files are read.

    recipe   resolved for the grid's size, with its vocabulary
    """

    def __init__(self, recipe: Recipe, grid: Any, ops: Ops) -> None:
        check_vocabulary(recipe)
        self.engine = open_engine(recipe, grid, ops)
        tokens, labels = random_batch(recipe)
        self.valid = labels.size
        own, micro = len(tokens) // grid.dp.size, recipe.train.micro_batch
        first = grid.dp.rank * own
        rows = [slice(lo, lo + micro) for lo in range(first, first + own, micro)]
        numbers = np.arange(len(tokens))
        self.batches: Sequence[Batch] = [
            Batch(tokens[part], labels[part], numbers[part]) for part in rows
        ]

    def step(self) -> float:
        """One optimizer step; the loss before it, equal on all ranks, or NaN where that
        is known one step later."""
        result = self.engine.step(self.batches, self.valid)
        return math.nan if result is None else result.loss


def random_batch(recipe: Recipe) -> np.ndarray:
    """Tokens and labels of a step, the same in every process.   (2, batch, context)"""
    shape = (2, recipe.train.global_batch, recipe.model.context)
    return np.random.default_rng(0).integers(0, recipe.model.vocab, shape)


def weight_count(recipe: Recipe) -> int:
    """Elements of the whole model; nothing is allocated."""
    model = build_model(
        recipe.model,
        ops=Ops(),
        tp=serial_grid().tp,
        sequence=False,
        experts=recipe.experts,
    )
    # A tied weight has an owner among those that name it.
    return sum(math.prod(p.shape) for p in model.parameters() if p.owner or not p.tied)


def check_vocabulary(recipe: Recipe) -> None:
    """Raises ConfigError, on all ranks, where only a tokenizer knows the vocabulary."""
    if recipe.model.vocab:
        return
    reason = "model.vocab = 0 needs the tokenizer, which is not read here; give its "
    error = ConfigError([f"{reason}size: model.vocab=N"], "the recipe")
    error.agreed = True
    raise error
