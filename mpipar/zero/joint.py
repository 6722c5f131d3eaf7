"""States of parameters that are summed over different axes, seen as one."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from mpipar.layers.model import UnitHooks
from mpipar.layers.parameter import Parameter
from mpipar.zero.cost import sums
from mpipar.zero.flat import FlatState, Piece
from mpipar.zero.state import TrainingState


class JointState(UnitHooks):
    """What several states do together: experts have their own axis to be summed over.

    parts   the states, of all parameters together
    """

    def __init__(self, parts: Sequence[TrainingState]) -> None:
        self.parts = list(parts)

    @property
    def flat(self) -> FlatState:
        """Arrays of the first part: of what all data ranks have alike."""
        return self.parts[0].flat

    @property
    def stage(self) -> int:
        """The ZeRO stage, of all parts."""
        return self.parts[0].stage

    @property
    def shard(self) -> Any:
        """Who shares the first part."""
        return self.parts[0].shard

    @property
    def count(self) -> int:
        """How many units `whole_units` gives."""
        return sum(part.count for part in self.parts)

    @property
    def parameters(self) -> list[Parameter]:
        """All of them, in memory order."""
        return [p for part in self.parts for p in part.parameters]

    def initialize(self, seed: int) -> None:
        """Starting values."""
        for part in self.parts:
            part.initialize(seed)

    def updated(self) -> None:
        """The masters are others: rounds and spreads their values."""
        for part in self.parts:
            part.updated()

    def spread(self) -> None:
        """The optimizer has updated masters, and own values where they are those to
        the nearest: spreads these."""
        for part in self.parts:
            part.spread()

    def pieces(self) -> list[Piece]:
        """What this rank updates of each unit."""
        return [piece for part in self.parts for piece in part.pieces()]

    def held(self) -> dict[str, int]:
        """Bytes that this rank holds, under the names of metrics."""
        return sums(part.held() for part in self.parts)

    def predicted(self) -> dict[str, int]:
        """The same, and bytes of moments, by formula."""
        return sums(part.predicted() for part in self.parts)

    def begin(self) -> None:
        """A step begins: nothing is summed yet."""
        for part in self.parts:
            part.begin()

    def finish_sums(self) -> None:
        """Waits until all gradients are sums over all axes but those of `ties`."""
        for part in self.parts:
            part.finish_sums()

    def ties_start(self) -> list[Any]:
        """Begins to add up gradients of tied weights; what is to be waited for."""
        return [handle for part in self.parts for handle in part.ties_start()]

    def finish(self) -> None:
        """Waits until all gradients are sums over all of their axes."""
        for part in self.parts:
            part.finish()

    def bind(self) -> None:
        """Makes the parameters views of this state, where they are of another one."""
        for part in self.parts:
            part.bind()

    def take_masters(self, other: "JointState") -> None:
        """Sets the masters to those of another state of the same model."""
        for part, its in zip(self.parts, other.parts, strict=True):
            part.take_masters(its)

    def whole_units(
        self, kind: Literal["values", "gradients"]
    ) -> Iterator[list[Parameter]]:
        """The parameters of one unit after the other, each while it is whole."""
        for part in self.parts:
            yield from part.whole_units(kind)

    # What the executor tells of the model's units

    def action_begins(self, number: int) -> None:
        for part in self.parts:
            part.action_begins(number)

    def action_ended(self, number: int) -> None:
        for part in self.parts:
            part.action_ended(number)

    def forward_begins(self, index: int) -> None:
        for part in self.parts:
            part.forward_begins(index)

    def forward_ended(self, index: int) -> None:
        for part in self.parts:
            part.forward_ended(index)

    def backward_begins(self, index: int) -> None:
        for part in self.parts:
            part.backward_begins(index)

    def backward_ended(self, index: int) -> None:
        for part in self.parts:
            part.backward_ended(index)

    def weight_begins(self, index: int) -> None:
        for part in self.parts:
            part.weight_begins(index)

    def weight_ended(self, index: int, *, last: bool) -> None:
        for part in self.parts:
            part.weight_ended(index, last=last)
