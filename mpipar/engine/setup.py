"""From a recipe to what a command runs on: grid, ops, tokenizer, samples."""

from typing import Any

from mpipar.comm import Host, Staged
from mpipar.config import Recipe, replace, resolve
from mpipar.data import Sampler, Tokenizer, load_tokenizer, load_tokens
from mpipar.grid import Grid
from mpipar.ops import Ops, make_ops


def load_vocabulary(recipe: Recipe, ranks: int) -> tuple[Recipe, Tokenizer]:
    """The tokenizer, and the recipe with its vocabulary filled in and checked again.

    Raises DataError where the tokenizer cannot be read, ConfigError where the
    vocabulary does not suit the layout; both on all ranks alike.
    """
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    if recipe.model.vocab == 0:
        recipe = replace(recipe, {"model.vocab": tokenizer.size})
    return resolve(recipe, ranks), tokenizer


def open_grid(recipe: Recipe, world: Any) -> tuple[Grid, Ops]:
    """The rank grid and this rank's ops; the caller closes the grid.

    world   MPI communicator of all ranks
    """
    ops = make_ops(recipe.train.device, recipe.train.precision)
    transport = Host() if ops.on_host else Staged()
    grid = Grid(
        world,
        recipe.parallel.axes,
        recipe.parallel.order,
        timeout_s=recipe.log.timeout_s,
        transport=transport,
    )
    return grid, ops


def make_sampler(recipe: Recipe, tokenizer: Tokenizer, grid: Any) -> Sampler:
    """The samples of this data rank. Collective: rank 0 reads text for all."""
    stream = load_tokens(
        recipe.data.source,
        tokenizer,
        recipe.data.validation,
        recipe.model.context,
        recipe.model.vocab,
        grid.world,
    )
    return Sampler(
        stream,
        recipe.train.seed,
        recipe.train.global_batch,
        recipe.train.micro_batch,
        grid.dp.rank,
        grid.dp.size,
        recipe.train.eval_samples,
    )
