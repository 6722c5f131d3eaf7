"""How the experts of a recipe lie on a grid, and how evenly tokens choose them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpipar.config import Recipe
from mpipar.layers.expert import ExpertCut


def expert_cut(recipe: Recipe, grid: Any) -> ExpertCut:
    """Who shares the experts of a resolved recipe; of one rank where there are none."""
    parallel = recipe.parallel
    shared = parallel.expert_tensor in (0, parallel.tensor)
    return ExpertCut(
        grid.ep,
        shared=shared,
        sequence=[grid.cp] if shared else [grid.tp, grid.cp],
        overlap=parallel.expert_overlap,
    )


def mixtures_of(recipe: Recipe) -> list[str]:
    """Names of all layers with experts, on whichever rank."""
    experts = recipe.experts
    blocks = range(experts.dense_blocks, recipe.model.layers) if experts.count else ()
    return [f"blocks.{number}.mlp" for number in blocks]


def loads_of(sums: np.ndarray, recipe: Recipe) -> dict[str, np.ndarray]:
    """Sums over all ranks of what `Step.loads` has, by layer: (experts + 1,) each."""
    names = mixtures_of(recipe)
    rows = sums.reshape(len(names), recipe.experts.count + 1)
    return dict(zip(names, rows, strict=True))


def bias_moves(loads: Mapping[str, np.ndarray], rate: float) -> dict[str, np.ndarray]:
    """−rate · sign(load − mean load) for the bias of each router, exactly.

    Source   Wang et al. 2024 (balancing without a loss), algorithm 1
    """
    if not rate:
        return {}
    return {
        f"{name}.router.bias": -rate * np.sign(len(own) * own - own.sum())
        for name, (*choices, _) in loads.items()
        for own in [np.array(choices)]
    }
