"""How experts, and the tokens that are sent to them, lie on the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpipar.comm.layout import R, S, reshard
from mpipar.layers.cost import Cost, move
from mpipar.layers.stream import Stream

Array = Any


@dataclass(frozen=True)
class ExpertCut:
    """Who shares what.

    ep        communicator of the ranks that share the experts of a block, by whole ones
    shared    True where tp shares each expert by its inner width: every rank of tp has
              all tokens, and sends each to the peer that has its part of the expert.
              False where ranks of tp have tokens of their own, which they send each to
              one rank
    sequence  communicators of the ranks whose tokens are of the same sequences
    overlap   half of the tokens travel while experts work on the others
    """

    ep: Any
    shared: bool = True
    sequence: Sequence[Any] = ()
    overlap: bool = False


class Summands(Stream):
    """The stream inside of an expert: every rank of tp has the same tokens, and a
    summand of their outputs, which the caller adds up for all experts at once."""

    def __init__(self, tp: Any) -> None:
        super().__init__(tp, sequence=False)

    def leave_backward(self, dx: Array) -> Array:
        return dx

    def enter(self, y: Array) -> Array:
        return y

    def enter_backward(self, dy: Array) -> Array:
        return dy

    def leave_cost(self, there: int, back: int) -> Cost:
        return Cost()

    def enter_cost(self, there: int, back: int) -> Cost:
        return Cost()

    def again_cost(self, nbytes: int) -> Cost:
        return Cost()


class OwnTokens(Stream):
    """Stream ↔ tokens that no other rank of tp has: positions are cut over tp, where
    the stream itself is not.

    Moves     R: forward and backward all-gather, (tp−1)/tp · b·s·d items each; S(1): 0
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.tp, sequence=stream.is_cut)

    def leave(self, x: Array) -> Array:
        return x if self.is_cut else reshard(x, R, S(1), self.tp)

    def leave_backward(self, dx: Array) -> Array:
        return dx if self.is_cut else reshard(dx, S(1), R, self.tp)

    def enter(self, y: Array) -> Array:
        return self.leave_backward(y)

    def enter_backward(self, dy: Array) -> Array:
        return self.leave(dy)

    def positions(self, positions: Array) -> Array:
        return reshard(positions, R, S(0), self.tp)

    def leave_cost(self, there: int, back: int) -> Cost:
        return self._gather(back)

    def enter_cost(self, there: int, back: int) -> Cost:
        return self._gather(there)

    def again_cost(self, nbytes: int) -> Cost:
        return Cost()

    def _gather(self, nbytes: int) -> Cost:
        if self.is_cut:
            return Cost()
        return move(self.tp.name, self.tp.size, S(1), R, nbytes)
