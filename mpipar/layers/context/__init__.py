"""How a sequence is cut over the context-parallel axis."""

from mpipar.layers.context.positions import held_positions

__all__ = ["held_positions"]
