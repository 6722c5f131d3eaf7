"""Where each rank of the grid sits: pure arithmetic on ranks, coordinates and nodes."""

import math
from collections.abc import Mapping, Sequence

from mpipar.config import AXES
from mpipar.errors import ConfigError


def check_sizes(sizes: Mapping[str, int], order: Sequence[str], ranks: int) -> None:
    """Raise ConfigError, on all ranks alike, unless the axes fill the world exactly."""
    wrong = [f"{axis} is not an axis; use {AXES}" for axis in sizes if axis not in AXES]
    if sorted(order) != sorted(AXES):
        wrong.append(f"order = {tuple(order)} must be a permutation of {AXES}")
    wrong += [
        f"{axis} = {size} must be at least 1"
        for axis, size in sizes.items()
        if size < 1
    ]
    product = math.prod(sizes.values())
    if not wrong and product != ranks:
        terms = " x ".join(f"{axis} {sizes.get(axis, 1)}" for axis in AXES)
        wrong.append(f"{terms} = {product} ranks, but {ranks} were started")
    if wrong:
        error = ConfigError(wrong, title="the grid")
        error.agreed = True
        raise error


def by_node(nodes: Sequence[int]) -> list[int]:
    """Return the ranks node by node: nodes as first met, ranks ascending inside one."""
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))


def coords_of(
    rank: int, sizes: Mapping[str, int], order: Sequence[str]
) -> dict[str, int]:
    """Return the coordinate of ``rank`` on every axis; ``order`` is fastest first."""
    coords = {}
    for axis in order:
        rank, coords[axis] = divmod(rank, sizes[axis])
    return coords


def peers_of(
    rank: int, axes: Sequence[str], sizes: Mapping[str, int], order: Sequence[str]
) -> list[int]:
    """Return the ranks that differ from ``rank`` in ``axes`` only, ascending."""
    peers, stride = [0], 1
    for axis in order:
        own = coords_of(rank, sizes, order)[axis]
        steps = range(sizes[axis]) if axis in axes else [own]
        peers = [peer + stride * step for step in steps for peer in peers]
        stride *= sizes[axis]
    return peers
