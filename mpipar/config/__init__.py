"""The recipe of a run: frozen, typed, and checked before any array exists."""

from mpipar.config.context_rules import head_ranks
from mpipar.config.fields import UNCUT, replace
from mpipar.config.kinds import AXES
from mpipar.config.presets import find_recipe, preset_names
from mpipar.config.read import read_recipe
from mpipar.config.recipe import (
    Checkpoint,
    Data,
    Experts,
    Log,
    Model,
    Optimizer,
    Parallel,
    Recipe,
    Train,
)
from mpipar.config.rules import resolve
from mpipar.config.write import to_toml, toml_value

__all__ = [
    "AXES",
    "UNCUT",
    "Checkpoint",
    "Data",
    "Experts",
    "Log",
    "Model",
    "Optimizer",
    "Parallel",
    "Recipe",
    "Train",
    "find_recipe",
    "head_ranks",
    "preset_names",
    "read_recipe",
    "replace",
    "resolve",
    "to_toml",
    "toml_value",
]
