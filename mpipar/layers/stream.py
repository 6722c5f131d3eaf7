"""The residual stream: how its tokens lie on the tensor-parallel axis.

Without sequence parallelism every tp rank holds all tokens (layout R). With it each
holds a slice of the positions (layout S(1)). Layers are written in these two words;
nothing else differs between the two methods.
"""

from typing import Any

from mpipar.comm.layout import Layout, P, R, S, reshard
from mpipar.errors import ShapeError
from mpipar.layers.cost import Cost, move
from mpipar.layers.parameter import Parameter, whole

Array = Any


class Stream:
    """Layout of the residual stream (b, s, d) over tp, and the moves in and out of it.

    Source   Shoeybi et al. 2019 (R); Korthikanti et al. 2022, section 4.2.2 (S(1))
    """

    def __init__(self, tp: Any, *, sequence: bool) -> None:
        self.tp = tp
        self.layout: Layout = S(1) if sequence and tp.size > 1 else R

    @property
    def is_cut(self) -> bool:
        """True where each rank holds only a slice of the positions."""
        return self.layout != R

    def tokens(self, batch: int, sequence: int) -> int:
        """Tokens of a micro-batch that this rank holds in the stream."""
        return batch * sequence // (self.tp.size if self.is_cut else 1)

    def replicated(self, name: str, shape: tuple[int, ...], init: str) -> Parameter:
        """A parameter applied to stream tokens: whole on every rank, its gradient a
        summand over tp where the stream is cut."""
        partial = "tp" if self.is_cut else ""
        return whole(name, shape, init, partial=partial, owner=self.tp.rank == 0)

    def leave(self, x: Array) -> Array:
        """Stream → all tokens on every rank: the input of a column-cut layer."""
        return reshard(x, self.layout, R, self.tp)

    def leave_backward(self, dx: Array) -> Array:
        """Adjoint of `leave`: summands of every rank → stream."""
        return self.enter(dx)

    def enter(self, y: Array) -> Array:
        """Summands of every rank → stream: the output of a row-cut layer.

        Raises ShapeError where the positions cannot be cut evenly.
        """
        if self.is_cut and y.shape[1] % self.tp.size:
            raise ShapeError(
                f"{y.shape[1]} positions cannot be cut evenly over {self.tp.size} ranks"
            )
        return reshard(y, P, self.layout, self.tp)

    def enter_backward(self, dy: Array) -> Array:
        """Adjoint of `enter`: stream → all tokens on every rank."""
        return reshard(dy, self.layout, R, self.tp)

    def positions(self, positions: Array) -> Array:
        """The entries of a per-position array (s, ...) that belong to this rank."""
        return reshard(positions, R, S(0), self.tp) if self.is_cut else positions

    def leave_cost(self, there: int, back: int) -> Cost:
        """Messages of `leave` and of its adjoint, for tensors of so many bytes."""
        return self._move(self.layout, R, there) + self._move(P, self.layout, back)

    def enter_cost(self, there: int, back: int) -> Cost:
        """Messages of `enter` and of its adjoint, for tensors of so many bytes."""
        return self._move(P, self.layout, there) + self._move(self.layout, R, back)

    def again_cost(self, nbytes: int) -> Cost:
        """Messages of gathering an input once more for a weight gradient."""
        return self._move(self.layout, R, nbytes)

    def _move(self, source: Layout, target: Layout, nbytes: int) -> Cost:
        return move(self.tp.name, self.tp.size, source, target, nbytes)
