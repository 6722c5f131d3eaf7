"""Weights that several ranks hold must be the same in every bit: a difference comes
from a faulty memory or processor, or from a fault in a program, and grows in silence.

Source   Hochschild et al. 2021 (cores that do not count); Dixit et al. 2021
"""

import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from mpipar.errors import CorruptionError
from mpipar.layers.parameter import Parameter
from mpipar.zero.joint import JointState

Array = Any


def check_copies(engine: Any) -> None:
    """Compares the weights of all ranks that hold the same ones. Collective.

    A hash of each unit travels, 8 bytes. Compared are the ranks over which gradients
    are summed (with ZeRO stage 3 those that hold the same part), and those of a
    tensor-parallel group for what each of them holds whole.

    Raises   CorruptionError on all ranks together that names the ranks which differ
             from most others, or both of two
    """
    wrong = [
        text
        for comm, names, arrays in _all_copies(engine)
        for text in _differing(comm, names, [engine.ops.to_host(x) for x in arrays])
    ]
    found = engine.grid.world.all_gather_obj((socket.gethostname(), wrong))
    lines = [
        f"\n  - rank {rank} on {host}: {', '.join(texts)}"
        for rank, (host, texts) in enumerate(found)
        if texts
    ]
    if lines:
        error = CorruptionError(
            f"after step {engine.number} ranks that must hold the same weights do not; "
            f"the memory or the processor of one may be faulty:{''.join(lines)}"
        )
        error.agreed = True
        raise error


def _all_copies(engine: Any) -> Iterator[tuple[Any, list[str], list[Array]]]:
    """Communicators, what their ranks all hold, and how it is called."""
    state = engine.state
    for part in state.parts if isinstance(state, JointState) else [state]:
        comm, arrays = part.copies()
        yield comm, [_name(unit.parameters) for unit in part.flat.units], arrays
    # With stage 3 no rank has anything whole between two steps.
    whole = [
        p
        for p in state.parameters
        if p.axis == "grad" and p.local_shape == p.shape and p.data is not None
    ]
    yield engine.grid.tp, [p.name for p in whole], [p.data for p in whole]


def _name(parameters: list[Parameter]) -> str:
    first, last = parameters[0].name, parameters[-1].name
    return first if first == last else f"{first} … {last}"


def _differing(comm: Any, names: list[str], arrays: list[np.ndarray]) -> Iterator[str]:
    """What of it this rank holds in another way than most ranks do."""
    if comm.size == 1 or not arrays:
        return
    digests = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(x)) for x in arrays]
    rows = comm.all_gather(np.array([digests], np.uint64))
    for column, name in enumerate(names):
        found = Counter(rows[:, column].tolist())
        (most, count), *others = found.most_common(2)
        if others and (digests[column] != most or count == others[0][1]):
            yield f"{name} (axis {comm.name})"
