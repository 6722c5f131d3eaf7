"""Which parts of the model a rank's pipeline stage has, and what it does when."""

import math
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.config import Recipe
from mpipar.config.schedules import is_file
from mpipar.engine.experts import expert_cut
from mpipar.engine.sequence import OwnSequence
from mpipar.errors import ConfigError
from mpipar.layers.base import Step
from mpipar.layers.model import Chunk, Model
from mpipar.models import build_model
from mpipar.ops import Ops
from mpipar.pipeline.partition import balanced, shared_out
from mpipar.pipeline.schedule_text import parse_schedule
from mpipar.pipeline.schedules import Schedule, make_schedule
from mpipar.zero.flat import FlatState


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
    counts, parts = given_counts(recipe), schedule.virtual_stages
    if counts is not None and len(counts) != parts:
        wrong.append(
            f'parallel.partition = "{parallel.partition}" must have {parts} numbers '
            f"for {path}, not {len(counts)}"
        )
    if wrong:
        raise ConfigError(wrong)
    return schedule


def given_counts(recipe: Recipe) -> list[int] | None:
    """Blocks of each virtual stage, where the recipe has them."""
    partition = recipe.parallel.partition
    if partition in ("even", "measured"):
        return None
    return [int(word) for word in partition.split(",")]


def own_chunks(schedule: Schedule, counts: list[int], stage: int) -> list[Chunk]:
    """What a stage has of the model.

    counts   blocks of each virtual stage
    """
    found = []
    for chunk in range(schedule.chunks):
        place = schedule.virtual(stage, chunk)
        start = sum(counts[:place])
        blocks = range(start, start + counts[place])
        found.append(Chunk(blocks, place == 0, place == len(counts) - 1))
    return found


def block_counts(
    recipe: Recipe, schedule: Schedule, grid: Any, ops: Ops, sequence: OwnSequence
) -> list[int]:
    """Blocks of each virtual stage; collective where they are to be measured."""
    if (counts := given_counts(recipe)) is not None:
        return counts
    layers = recipe.model.layers
    parts = range(schedule.virtual_stages)
    owners = [schedule.owner(place)[0] for place in parts]
    if recipe.parallel.partition == "even":
        return shared_out(layers, owners)
    first, block, last = _measure(recipe, grid, ops, sequence)
    if schedule.chunks == 1:
        return balanced([block] * layers, len(parts), first=first, last=last)
    return shared_out(layers, owners, time=block, first=first, last=last)


def _measure(
    recipe: Recipe, grid: Any, ops: Ops, sequence: OwnSequence, repeats: int = 3
) -> list[float]:
    """Seconds of embedding, block and head, forward and backward, on a micro-batch.

    The best of a few, and the slowest rank's.
    """
    # The last block has experts where any has
    last = recipe.model.layers - 1
    model = build_model(
        recipe.model,
        ops=ops,
        tp=grid.tp,
        sequence=recipe.parallel.sequence,
        chunks=[Chunk(range(last, last + 1))],
        core=sequence.core,
        experts=recipe.experts,
        cut=expert_cut(recipe, grid),
    )
    FlatState(model.groups().parameters, ops).initialize(recipe.train.seed)
    shape = recipe.train.micro_batch, len(sequence.own)
    ids = ops.asarray(np.zeros(shape, np.int64))
    step = Step(
        positions=ops.asarray(np.minimum(sequence.own, sequence.context - 1)),
        samples=ops.asarray(np.arange(shape[0])),
        labels=ids,
        valid=ids.size,
        sequences=recipe.train.global_batch,
        length=recipe.model.context,
    )
    again = model.block_units() if recipe.train.recompute == "full" else ()
    best = np.full(len(model.units), math.inf)
    for _ in range(repeats):
        best = np.minimum(best, _time_units(model, ids, step, ops, again))
    return grid.world.all_reduce(best, "max").tolist()


def _time_units(
    model: Model, x: Any, step: Step, ops: Ops, again: Collection[int]
) -> np.ndarray:
    """Seconds that each unit takes for one micro-batch, those of `again` with a second
    forward pass."""
    seconds, kept, dy = np.zeros(len(model.units)), [], None
    clock = time.perf_counter
    for index, unit in enumerate(model.units):
        began = clock()
        given = x
        x, saved = unit.forward(given, step)
        if index in again:
            _, saved = unit.forward(given, step)
        ops.synchronize()
        seconds[index] += clock() - began
        kept.append(saved)
    for index in reversed(range(len(model.units))):
        began = clock()
        dy = model.units[index].backward(dy, kept.pop())
        ops.synchronize()
        seconds[index] += clock() - began
    return seconds
