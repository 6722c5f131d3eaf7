"""Which parts of the model a rank's pipeline stage has, and what it does when."""

from pathlib import Path

from mpipar.config import Recipe
from mpipar.config.schedules import is_file
from mpipar.errors import ConfigError
from mpipar.layers.model import Chunk
from mpipar.pipeline.partition import even
from mpipar.pipeline.schedule_text import parse_schedule
from mpipar.pipeline.schedules import Schedule, make_schedule


def plan_schedule(recipe: Recipe, micro_batches: int) -> Schedule:
    """The schedule of a resolved recipe for a number of micro-batches.

    Raises   ConfigError where it is a file that cannot be read or does not fit
    """
    parallel = recipe.parallel
    if not is_file(parallel.schedule):
        return make_schedule(
            parallel.schedule, parallel.pipeline, micro_batches, parallel.chunks
        )
    path = Path(parallel.schedule)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = f'cannot read parallel.schedule = "{path}": {problem}'
        raise ConfigError([reason]) from None
    schedule = parse_schedule(text, path.stem)
    rules = {
        "parallel.pipeline": (parallel.pipeline, schedule.stages),
        "train.global_batch / (parallel.data * train.micro_batch)": (
            micro_batches,
            schedule.micro_batches,
        ),
        "parallel.chunks": (parallel.chunks or schedule.chunks, schedule.chunks),
    }
    wrong = [
        f"{key} = {own} must be {needed} for {path}"
        for key, (own, needed) in rules.items()
        if own != needed
    ]
    if wrong:
        raise ConfigError(wrong)
    return schedule


def own_chunks(recipe: Recipe, schedule: Schedule, stage: int) -> list[Chunk]:
    """What a stage has of the model."""
    counts = block_counts(recipe, schedule.virtual_stages)
    found = []
    for chunk in range(schedule.chunks):
        place = schedule.virtual(stage, chunk)
        start = sum(counts[:place])
        blocks = range(start, start + counts[place])
        found.append(Chunk(blocks, place == 0, place == len(counts) - 1))
    return found


def block_counts(recipe: Recipe, parts: int) -> list[int]:
    """Blocks of each virtual stage."""
    partition = recipe.parallel.partition
    if partition == "even":
        return even(recipe.model.layers, parts)
    return [int(word) for word in partition.split(",")]
