"""How the experts of a recipe lie on a grid."""

from typing import Any

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
