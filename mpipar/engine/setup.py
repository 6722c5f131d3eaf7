"""From a recipe to what a command runs on: grid, ops, tokenizer, samples."""

from typing import Any

from mpipar.comm import raise_together
from mpipar.comm.choice import choose, limit_memory
from mpipar.config import Recipe, replace, resolve
from mpipar.data import Sampler, Tokenizer, load_tokenizer, load_tokens
from mpipar.engine.stages import plan_schedule
from mpipar.errors import ConfigError, DataError, DeviceError
from mpipar.grid import Grid
from mpipar.ops import Ops, make_ops


def open_grid(recipe: Recipe, world: Any) -> tuple[Grid, Ops]:
    """The rank grid and this rank's ops; the caller closes the grid.

    world    MPI communicator of all ranks
    Raises   DeviceError on all ranks together where one has not the device
    """
    device, precision = recipe.train.device, recipe.train.precision
    ops, error = None, None
    parallel = recipe.parallel
    apart = parallel.expert_tensor < parallel.tensor
    grid = Grid(
        world,
        parallel.axes,
        parallel.order,
        timeout_s=recipe.log.timeout_s,
        devices=device != "cpu",
        experts=parallel.expert if recipe.experts.count else 0,
        along=("tp", "cp", "dp") if apart else ("cp", "dp"),
        hierarchical=parallel.hierarchical,
        check_calls=recipe.log.check_calls,
    )
    # The first run on a node compiles kernels: one rank does, the others find them.
    if grid.node_rank > 0:
        grid.world.barrier()
    try:
        ops = make_ops(device, precision, grid.node_rank, recipe.train.attention)
        if recipe.train.graph and ops.on_host:
            raise DeviceError(
                "train.graph = true needs a GPU, and none is used; try "
                'train.graph = false, or train.device = "cuda" where there is one'
            )
    except DeviceError as problem:
        error = problem
    if grid.node_rank == 0:
        grid.world.barrier()
    try:
        raise_together(error, grid.world)
        if grid.size > 1 and device != "cpu":
            _choose_transport(parallel.transport, grid, ops)
    except DeviceError:
        grid.close()
        raise
    return grid, ops


def _choose_transport(asked: str, grid: Grid, ops: Ops) -> None:
    """Say how arrays travel where they lie on devices; those of ranks that share one
    share its memory."""
    on_host = grid.world.all_gather_obj(ops.on_host)
    if len(set(on_host)) > 1:
        rank, reason = on_host.index(True), "some ranks have a GPU, but not all"
        words = f'{reason}, such as rank {rank}: try train.device = "cpu"'
        raise_together(DeviceError(words), grid.world)
    if not ops.on_host:
        choice = choose(asked, grid.world, ops)
        limit_memory(choice.sharing)
        grid.use(choice.memory, choice.nccl)
        grid.road = choice.text
    elif asked != "auto":
        reason = f'parallel.transport = "{asked}" needs a GPU, and there is none'
        raise_together(DeviceError(f'{reason}; try "auto"'), grid.world)


def load_vocabulary(recipe: Recipe, world: Any) -> tuple[Recipe, Tokenizer]:
    """The tokenizer, and the recipe with its vocabulary filled in and checked again.

    world    communicator of all ranks
    Raises   DataError where its size is needed and the tokenizer cannot be read,
             ConfigError where the vocabulary does not suit the layout, or the file of a
             schedule does not; on all ranks together
    """
    error: Exception | None = None
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    try:
        if recipe.model.vocab == 0:
            recipe = replace(recipe, {"model.vocab": tokenizer.size})
        if recipe.data.documents == "separate" and recipe.data.end_token < 0:
            recipe = replace(recipe, {"data.end_token": _end_of(tokenizer)})
        recipe = resolve(recipe, world.size)
        plan_schedule(recipe, recipe.accumulation)
    except (ConfigError, DataError) as problem:
        error = problem
    raise_together(error, world)
    return recipe, tokenizer


def _end_of(tokenizer: Tokenizer) -> int:
    if tokenizer.end_id is None:
        raise ConfigError(
            [
                'data.documents = "separate" needs the id that ends a document, which '
                "this tokenizer does not name; give data.end_token"
            ]
        )
    return tokenizer.end_id


def make_sampler(
    recipe: Recipe,
    tokenizer: Tokenizer,
    grid: Any,
    first_step: int = 0,
    first_sample: int = 0,
) -> Sampler:
    """The samples of this data rank. Collective: rank 0 reads text for all.

    first_step, first_sample   where a run begins that goes on with another one
    """
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
        first_step,
        first_sample,
    )
