"""The grid of one process, and what every grid offers."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from mpipar.comm import Counters, NullCommunicator
from mpipar.grid.places import AXES

if TYPE_CHECKING:
    from mpipar.comm import Communicator


class SerialGrid:
    """One rank: every axis is a null communicator, and MPI is never loaded.

    tp cp dp pp  the axes
    grad         dp x cp joined: the ranks over which gradients are summed
    ep           of those, or of tp x dp x cp: neighbours that share experts
    edp          the ranks of the same experts: over which their gradients are summed
    world        all ranks
    node_rank    place among the ranks of this node, which selects a device
    coords       own coordinate on each axis
    counters     what was moved, by axis and operation
    road         how arrays of devices travel, in words; "" where there are none
    """

    tp: "Communicator | NullCommunicator"
    cp: "Communicator | NullCommunicator"
    dp: "Communicator | NullCommunicator"
    pp: "Communicator | NullCommunicator"
    grad: "Communicator | NullCommunicator"
    ep: "Communicator | NullCommunicator"
    edp: "Communicator | NullCommunicator"
    world: "Communicator | NullCommunicator"

    size = 1
    rank = 0
    node_rank = 0
    road = ""

    def __init__(self) -> None:
        self.sizes = dict.fromkeys(AXES, 1)
        self.order: tuple[str, ...] = AXES
        self.coords = dict.fromkeys(AXES, 0)
        self.counters = Counters()
        for name in (*AXES, "grad", "ep", "edp", "world"):
            setattr(self, name, NullCommunicator(name))

    def sub(self, axis: str, ranks: int) -> "Communicator | NullCommunicator":
        """Return the communicator of blocks of ``ranks`` neighbours on ``axis``."""
        return NullCommunicator(f"{axis}/{ranks}")

    def across(self, axis: str, ranks: int) -> "Communicator | NullCommunicator":
        """Return the communicator of the ranks with the same place in each block."""
        return NullCommunicator(f"{axis}:{ranks}")

    def ends(self) -> "Communicator | NullCommunicator":
        """Return the communicator of the first and last rank of the pipeline."""
        return NullCommunicator("ends")

    def crosses_nodes(self, axis: str) -> bool:
        """True if some group of ``axis`` has ranks on more than one node."""
        return False

    def far_distance(self) -> int:
        """Return the least distance at which most ranks meet one of another node."""
        return 1

    def describe(self) -> str:
        """Return the axes on one line, fastest first, as in "tp 2 x dp 4 = 8 ranks"."""
        axes = [f"{a} {self.sizes[a]}" for a in self.order if self.sizes[a] > 1]
        experts = f"ep {self.ep.size} in " if self.ep.size > 1 else ""
        noun = "rank" if self.size == 1 else "ranks"
        if not axes:
            return f"1 {noun}"
        return f"{experts}{' x '.join(axes)} = {self.size} {noun}"

    def close(self) -> None:
        """Free everything; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def serial_grid() -> SerialGrid:
    """Return the grid of one process, without MPI."""
    return SerialGrid()
