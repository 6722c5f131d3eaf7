"""One optimizer step of a model on a layout, and what it takes to set it up."""

from mpipar.engine.continuous import open_engine
from mpipar.engine.copies import check_copies
from mpipar.engine.engine import Engine, StepResult, finite
from mpipar.engine.setup import load_vocabulary, make_sampler, open_grid

__all__ = [
    "Engine",
    "StepResult",
    "check_copies",
    "finite",
    "load_vocabulary",
    "make_sampler",
    "open_engine",
    "open_grid",
]
