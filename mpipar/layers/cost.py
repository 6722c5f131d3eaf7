"""What a layer costs: the one source of truth for memory, traffic and FLOPs."""

from collections import Counter
from dataclasses import dataclass, field

from mpipar.comm.layout import Layout, P, R, volume


@dataclass(frozen=True)
class Cost:
    """Cost of one micro-batch on one rank, forward and backward together.

    flops   of the forward pass: 2 per multiply-add of matrix products, attention over
            its causal half; a training step takes three times as many
    saved   bytes held from forward until backward
    left    bytes that the weight gradients need once the input gradient is there
    calls, moved   messages and bytes sent, by (axis, operation)
    """

    flops: int = 0
    saved: int = 0
    left: int = 0
    calls: Counter = field(default_factory=Counter)
    moved: Counter = field(default_factory=Counter)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.saved + other.saved,
            self.left + other.left,
            self.calls + other.calls,
            self.moved + other.moved,
        )


def move(axis: str, ranks: int, source: Layout, target: Layout, nbytes: int) -> Cost:
    """A reshard of a tensor of `nbytes` (its full size on that axis)."""
    if source == target or source is R or ranks == 1:
        return Cost()
    if source is P:
        op = "all_reduce" if target is R else "reduce_scatter"
    else:
        op = "all_gather" if target is R else "all_to_all"
    sent = volume(source, target, ranks, nbytes)
    return Cost(calls=Counter({(axis, op): 1}), moved=Counter({(axis, op): sent}))
