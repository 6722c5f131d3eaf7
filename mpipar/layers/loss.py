"""Cross-entropy over a vocabulary cut over tp; logits are never gathered."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.comm import P, R
from mpipar.layers.base import Layer, Step
from mpipar.layers.cost import Cost, move
from mpipar.layers.parameter import Interval
from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class LossSaved:
    """Exponentials of the logits, or logits; peaks, sums of exponentials, target
    columns, and the micro-batch."""

    e: Array
    peak: Array
    total: Array
    local: Array
    step: Step


class VocabLoss(Layer):
    """L = Σ_tokens (log Σ_v exp z − z[label]), tokens without a label left out.

    Returns the sum over this micro-batch as `Ops.loss_sum` does; the gradient is that
    of the sum divided by `step.valid`, the number of valid labels of the whole step,
    times `step.loss_scale`.

    Shapes    z (b, s, v/tp), overwritten;  labels (b, s)
    Backward  dz = (softmax(z) − onehot(label))·scale/valid, zero without a label
    Saves     exp(z − max), or z: b·s·v/tp items; max and Σ: 2·b·s items; target
              columns: 8·b·s bytes
    Moves     all-reduce (max) of b·s items and all-reduce (sum) of 2·b·s items, forward
    Flops     none counted
    Precision the compute type; the sum over tokens in float64
    Source    Shoeybi et al. 2019, section 3 (fused cross-entropy)

    dtype     of z, by itself the compute type
    """

    def __init__(
        self,
        held: Interval,
        vocab: int,
        *,
        ops: Ops,
        tp: Any,
        dtype: np.dtype | None = None,
    ) -> None:
        self.held, self.vocab, self.ops, self.tp = held, vocab, ops, tp
        self.dtype = dtype or ops.dtype

    def forward(self, x: Array, step: Step) -> tuple[Any, LossSaved]:
        xp, ops = self.ops.xp, self.ops
        logits = x.reshape(-1, x.shape[-1])
        labels = step.labels.reshape(-1)
        local = labels - self.held[0]
        peak, *sums = ops.xent_fwd(
            logits, local, lambda own: self.tp.all_reduce(own, "max")
        )
        total, target = self.tp.all_reduce(xp.stack(sums))
        loss = ops.loss_sum(total, target, labels)
        return loss, LossSaved(logits, peak, total, local, step)

    def backward_input(self, dy: Any, saved: LossSaved) -> tuple[Array, None]:
        labels = saved.step.labels
        factor = saved.step.loss_scale / max(saved.step.valid, 1)
        seed = (labels.reshape(-1) >= 0) * factor
        dz = self.ops.xent_dx(
            saved.e, saved.peak, saved.total, saved.local, seed.astype(self.ops.dtype)
        )
        return dz.reshape(*labels.shape, -1), None

    def cost(self, batch: int, sequence: int) -> Cost:
        tokens, item = batch * sequence, self.ops.dtype.itemsize
        columns = self.held[1] - self.held[0]
        # `total` is half of the array that both sums travelled in.
        saved = columns * self.dtype.itemsize + 3 * item + 8
        cost = Cost(saved=tokens * saved)
        for items in (1, 2):
            cost += move(self.tp.name, self.tp.size, P, R, items * tokens * item)
        return cost
