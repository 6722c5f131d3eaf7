"""How masters become 16-bit values: to the nearest, or stochastically.

An update that is smaller than half of a value's last place is lost when it is rounded
to the nearest; rounded up or down by a draw, values are right in the mean.

Source   Gupta et al. 2015 (Deep learning with limited numerical precision)
"""

import math
from typing import Any

from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops
from mpipar.ops.philox import stream_key

Array = Any


class Rounding:
    """Rounds stretches of units.

    seed      of the draws; None = to the nearest
    updates   that led to the masters: each has other draws
    """

    def __init__(self, ops: Ops, seed: int | None = None) -> None:
        self.ops, self.seed, self.updates = ops, seed, 0

    @property
    def is_stochastic(self) -> bool:
        """True where values depend on draws."""
        return self.seed is not None

    def store(self, unit: Any, begin: int, x: Array, out: Array) -> None:
        """out = x, which lies in a unit from `begin` on; flat arrays of equal size.

        A draw depends on the seed, the name of the tensor, the index in it and the
        updates alone: ranks that hold the same element have the same bits. Padding is
        left out where there are draws.
        """
        if self.seed is None:
            self.ops.operand(x, out=out)
            return
        for p, lo, hi in unit.places():
            start, stop = max(lo, begin), min(hi, begin + len(x))
            if start < stop:
                own = slice(start - begin, stop - begin)
                self.ops.store_stochastic(
                    x[own],
                    out[own],
                    begin=start - lo,
                    rows=_rows(p),
                    step=self.updates,
                    key=stream_key(self.seed, f"{p.name}.rounding"),
                )


def _rows(p: Parameter) -> tuple[int, int, int]:
    """Where a box lies in its tensor: index of the first element, elements of a row,
    and from one row to the next. Dims between the first and the last are not cut."""
    lo, hi = p.box[-1]
    before = p.box[0][0] * math.prod(p.shape[1:]) if p.box[1:] else 0
    return before + lo, hi - lo, p.shape[-1]
