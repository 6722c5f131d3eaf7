"""Model families: block order and sizes, built from mpipar.layers."""

from typing import Any

from mpipar.layers.model import Model
from mpipar.ops import Ops


def build_model(model: Any, *, ops: Ops, tp: Any, sequence: bool) -> Model:
    """The model of a resolved recipe's [model] section, as this rank of tp holds it.

    model     the section;  tp  communicator of the tensor-parallel axis
    sequence  whether the residual stream is cut by positions over tp
    """
    if model.family == "llama":
        from mpipar.models.llama import build
    else:
        from mpipar.models.gpt import build
    return build(model, ops=ops, tp=tp, sequence=sequence)
