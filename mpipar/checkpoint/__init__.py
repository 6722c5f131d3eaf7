"""Weights on disk, as global arrays that any HDF5 tool reads."""

from mpipar.checkpoint.gather import global_arrays
from mpipar.checkpoint.model_file import (
    find_checkpoint,
    load_weights,
    read_recipe_text,
    save_weights,
)

__all__ = [
    "find_checkpoint",
    "global_arrays",
    "load_weights",
    "read_recipe_text",
    "save_weights",
]
