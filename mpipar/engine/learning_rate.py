"""Learning rate over time."""

import math

from mpipar.config import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Rate of update `step` (0-based): linear warm-up, then cosine or constant.

    The cosine ends at min_lr · lr on the last step (Loshchilov & Hutter 2017).
    """
    o, steps = recipe.optimizer, recipe.train.steps
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    if o.schedule == "constant":
        return o.lr
    span = steps - 1 - o.warmup
    progress = min(1.0, (step - o.warmup) / span) if span > 0 else 1.0
    return o.lr * (
        o.min_lr + (1.0 - o.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    )
