"""Model families: block order and sizes, built from mpipar.layers."""

from collections.abc import Sequence
from typing import Any

from mpipar.comm import NullCommunicator
from mpipar.layers.context import Core, LocalCore
from mpipar.layers.expert import ExpertCut
from mpipar.layers.model import Chunk, Model
from mpipar.layers.stream import Stream
from mpipar.ops import Ops


def build_model(
    model: Any,
    *,
    ops: Ops,
    tp: Any,
    sequence: bool,
    chunks: Sequence[Chunk] | None = None,
    core: Core | None = None,
    experts: Any = None,
    cut: ExpertCut | None = None,
) -> Model:
    """The model of a resolved recipe's [model] section, as this rank of tp holds it.

    model     the section;  tp  communicator of the tensor-parallel axis
    sequence  whether the residual stream is cut by positions over tp
    chunks    which parts this rank's pipeline stage has; None = the whole model
    core      how attention sees a sequence that is cut over ranks; None = it is not
    experts   the [experts] section; None = there are none
    cut       how experts lie on the ranks; None = tp shares each of them, nobody else
    """
    if model.family == "llama":
        from mpipar.models.llama import Llama as Kind
    else:
        from mpipar.models.gpt import Gpt as Kind
    parts = {"stream": Stream(tp, sequence=sequence), "core": core or LocalCore(ops)}
    if experts is not None and experts.count:
        from mpipar.models.mixtral import mixtures

        cut = cut or ExpertCut(NullCommunicator("ep"))
        parts["mixture"] = mixtures(experts, cut)
        parts["dense_blocks"] = experts.dense_blocks
    family = Kind(model, ops=ops, **parts)
    return family.build(chunks or [Chunk(range(model.layers))])
