"""Cross-entropy over a vocabulary cut over tp; logits are never gathered."""

from dataclasses import dataclass
from typing import Any

from mpipar.comm import P, R
from mpipar.layers.base import Layer, Step
from mpipar.layers.cost import Cost, move
from mpipar.layers.parameter import Interval
from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class LossSaved:
    """Exponentials of the logits, their sums, target columns, and the micro-batch."""

    e: Array
    total: Array
    local: Array
    step: Step


class VocabLoss(Layer):
    """L = Σ_tokens (log Σ_v exp z − z[label]), tokens without a label left out.

    Returns the sum over this micro-batch as a Python float; the gradient is that of the
    sum divided by `step.valid`, the number of valid labels of the whole step, times
    `step.loss_scale`.

    Shapes    z (b, s, v/tp), overwritten;  labels (b, s)
    Backward  dz = (softmax(z) − onehot(label))·scale/valid, zero without a label
    Saves     exp(z − max): b·s·v/tp items; Σ: b·s items; target columns: 8·b·s bytes
    Moves     all-reduce (max) of b·s items and all-reduce (sum) of 2·b·s items, forward
    Flops     none counted
    Precision the compute type; the sum over tokens in float64
    Source    Shoeybi et al. 2019, section 3 (fused cross-entropy)
    """

    def __init__(self, held: Interval, vocab: int, *, ops: Ops, tp: Any) -> None:
        self.held, self.vocab, self.ops, self.tp = held, vocab, ops, tp

    def forward(self, x: Array, step: Step) -> tuple[float, LossSaved]:
        xp = self.ops.xp
        logits = x.reshape(-1, x.shape[-1])
        labels = step.labels.reshape(-1)
        local = labels - self.held[0]
        peak = self.tp.all_reduce(self.ops.row_max(logits), "max")
        sums = xp.stack(self.ops.xent_fwd(logits, local, peak))
        total, target = self.tp.all_reduce(sums)
        losses = (xp.log(total) - target)[labels >= 0]
        loss = float(losses.sum(dtype=xp.float64))
        return loss, LossSaved(logits, total, local, step)

    def backward_input(self, dy: Any, saved: LossSaved) -> tuple[Array, None]:
        labels = saved.step.labels
        factor = saved.step.loss_scale / max(saved.step.valid, 1)
        seed = (labels.reshape(-1) >= 0) * factor
        dz = self.ops.xent_dx(
            saved.e, saved.total, saved.local, seed.astype(self.ops.dtype)
        )
        return dz.reshape(*labels.shape, -1), None

    def cost(self, batch: int, sequence: int) -> Cost:
        tokens, item = batch * sequence, self.ops.dtype.itemsize
        columns = self.held[1] - self.held[0]
        # `total` is half of the array that both sums travelled in.
        cost = Cost(saved=tokens * (columns * item + 2 * item + 8))
        for items in (1, 2):
            cost += move(self.tp.name, self.tp.size, P, R, items * tokens * item)
        return cost
