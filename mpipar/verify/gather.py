"""Puts global arrays together on one rank, one at a time, from their owners' boxes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpipar.layers.parameter import Parameter

Array = Any


def global_arrays(
    parameters: Sequence[Parameter],
    select: Callable[[Parameter], np.ndarray],
    grid: Any,
    dtype: np.dtype,
) -> Iterator[tuple[str, np.ndarray | None]]:
    """(name, whole array) of every parameter; None on all ranks but world rank 0.

    Collective: every rank must run through the whole iterator. Each box is sent by one
    owner, and rank 0 holds one whole array at a time.

    select   the local array of a parameter to gather, such as its values, on the host
    dtype    of these arrays
    """
    world = grid.world
    held = {
        p.name: p for p in parameters if p.owner and getattr(grid, p.axis).rank == 0
    }
    boxes = world.gather_obj({name: (p.shape, p.box) for name, p in held.items()})
    order: list[str] = []
    if world.rank == 0:
        order = list(dict.fromkeys(name for ranks in boxes for name in ranks))
    for name in world.broadcast_obj(order):
        if world.rank == 0:
            yield name, _assemble(name, boxes, held, select, world, dtype)
            continue
        if name in held:
            world.send(np.ascontiguousarray(select(held[name])), 0)
        yield name, None


def _assemble(
    name: str,
    boxes: list[dict[str, tuple]],
    held: dict[str, Parameter],
    select: Callable[[Parameter], np.ndarray],
    world: Any,
    dtype: np.dtype,
) -> np.ndarray:
    """The whole array on rank 0, its own box included."""
    whole: np.ndarray | None = None
    for rank, ranks_boxes in enumerate(boxes):
        if name not in ranks_boxes:
            continue
        shape, box = ranks_boxes[name]
        region = tuple(slice(lo, hi) for lo, hi in box)
        if rank == 0:
            part = select(held[name])
        else:
            part = world.recv(np.empty([hi - lo for lo, hi in box], dtype), rank)
        if whole is None:
            whole = np.empty(shape, part.dtype)
        whole[region] = part
    assert whole is not None
    return whole
