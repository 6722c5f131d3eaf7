"""Cores of their own for the ranks of a node."""

import os
from typing import Any


def take_own_cores(grid: Any) -> None:
    """Binds this rank to its share of the cores of the node, where there are enough.

    Comes before `make_ops`, which counts the cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // grid.size
    if share:
        first = grid.node_rank * share
        os.sched_setaffinity(0, cores[first : first + share])
