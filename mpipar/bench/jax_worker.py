"""Training steps of a recipe in JAX, served to the comparison. Imports no mpipar but
its own neighbours, since this Python may have nothing else of it."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mpipar.bench.jax_model import mean_loss
from mpipar.bench.turns import Turns
from mpipar.bench.work import Work, read_work, worker_arguments

# As torch's clip_grad_norm_ adds to the norm.
CLIP_EPS = 1e-6

Arrays = dict[str, Array]
State = tuple[Arrays, Arrays, Arrays, Array]


def main() -> None:
    """Serve steps until the orders end."""
    args = worker_arguments().parse_args()
    # XLA makes its threads at the first array: after the pinning.
    with Turns(args.folder, rank=0, processes=1, cores=args.cores) as turns:
        facts = {"jax": jax.__version__, "numpy": np.__version__}
        threads = len(os.sched_getaffinity(0))
        turns.serve(_make_step(read_work(args.folder)), facts | {"threads": threads})


def _make_step(work: Work) -> Callable[[], float]:
    """One training step, as a function."""
    w = {name: _laid_out(name, array) for name, array in work.weights.items()}
    m, v = ({name: jnp.zeros_like(a) for name, a in w.items()} for _ in range(2))
    state = (w, m, v, jnp.zeros(()))
    ids, labels = jnp.asarray(work.ids), jnp.asarray(work.labels)
    train = jax.jit(partial(_train, work.recipe), donate_argnums=0)

    def step() -> float:
        nonlocal state
        state, loss = train(state, ids, labels)
        jax.block_until_ready(state)
        return loss.item()

    return step


def _laid_out(name: str, array: np.ndarray) -> Array:
    """Matrices as JAX's users have them, (in, out); tables of vectors as they are."""
    is_table = name.startswith(("embedding.", "head."))
    return jnp.asarray(array if is_table else array.T)


def _train(
    recipe: Mapping[str, Any], state: State, ids: Array, labels: Array
) -> tuple[State, Array]:
    """State after one step of AdamW as the recipe says, and the loss before it."""
    w, m, v, count = state
    o, count = recipe["optimizer"], count + 1
    loss, grad = jax.value_and_grad(partial(mean_loss, recipe["model"]))(w, ids, labels)
    grad = _clipped(grad, recipe["train"]["clip"])
    m = {k: o["beta1"] * m[k] + (1 - o["beta1"]) * g for k, g in grad.items()}
    v = {k: o["beta2"] * v[k] + (1 - o["beta2"]) * g * g for k, g in grad.items()}
    m_scale, v_scale = 1 - o["beta1"] ** count, 1 - o["beta2"] ** count

    def updated(k: str) -> Array:
        # Matrices alone decay.
        kept = 1 - o["lr"] * o["weight_decay"] if w[k].ndim > 1 else 1.0
        root = jnp.sqrt(v[k] / v_scale) + o["eps"]
        return kept * w[k] - o["lr"] * (m[k] / m_scale) / root

    return ({k: updated(k) for k in w}, m, v, count), loss


def _clipped(grad: Arrays, clip: float) -> Arrays:
    """clip_grad_norm_ of torch; 0 = off."""
    if not clip:
        return grad
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in grad.values()))
    factor = jnp.minimum(1.0, clip / (norm + CLIP_EPS))
    return {name: factor * g for name, g in grad.items()}


if __name__ == "__main__":
    main()
