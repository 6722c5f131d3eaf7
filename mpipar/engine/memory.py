"""What a rank holds, in bytes: counted, and by formula."""

import math
from typing import Any

from mpipar.pipeline.executor import Held, peak_bytes
from mpipar.zero.cost import sums


def held_memory(engine: Any) -> dict[str, int]:
    """Bytes of the arrays that this rank holds now, by kind."""
    optimizer = engine.optimizer
    return {
        **sums(state.held() for state in engine.states),
        "optimizer": optimizer.m.nbytes + optimizer.v.nbytes,
        "activations": engine.executor.held_bytes,
    }


def predicted_memory(engine: Any) -> dict[str, int]:
    """Bytes that this rank should hold, by formula, under the names of metrics."""
    batch, context = engine.micro_shape
    found = engine.state.predicted()
    given = math.prod(engine.model.stream_shape(batch, context))
    given *= engine.ops.dtype.itemsize
    for kind in found.keys() - {"optimizer"}:
        found[kind] *= len(engine.states)
    costs = [unit.cost(batch, context) for unit in engine.model.units]
    peak = peak_bytes(
        engine.schedule.actions[engine.grid.pp.rank],
        engine.model.chunks,
        [Held(cost.saved, cost.left, given) for cost in costs],
        engine.executor.again,
    )
    return found | {"activations_peak": peak}
