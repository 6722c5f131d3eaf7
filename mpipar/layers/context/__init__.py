"""How a sequence is cut over the context-parallel axis, and attention over the cuts."""

from typing import Any

from mpipar.layers.context.core import Core, Dropout, Heads, LocalCore
from mpipar.layers.context.cut import LAYOUTS, Cut, held_positions
from mpipar.layers.context.gathered import GatheredCore
from mpipar.layers.context.ring import RingCore
from mpipar.layers.context.ulysses import UlyssesCore
from mpipar.ops import Ops

__all__ = [
    "LAYOUTS",
    "Core",
    "Cut",
    "Dropout",
    "Heads",
    "LocalCore",
    "held_positions",
    "make_core",
]


def make_core(ops: Ops, cut: Cut, grid: Any) -> Core:
    """The attention core for a cut of the sequence over the grid's context axis.

    Neighbours of it exchange heads; ranks with the same place among those exchange keys
    and values.
    """
    inner = grid.cp if cut.blocks == 1 else grid.sub("cp", cut.heads)
    outer = grid.cp if cut.heads == 1 else grid.across("cp", cut.heads)
    core: Core = LocalCore(ops)
    if outer.size > 1:
        kind = GatheredCore if cut.method == "allgather" else RingCore
        core = kind(ops, outer, cut)
    return core if inner.size == 1 else UlyssesCore(ops, inner, core)
