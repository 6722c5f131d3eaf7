"""AdamW over the flat buffers, with clipping by the true global norm."""

import math
from dataclasses import dataclass
from typing import Any

from mpipar.zero.flat import FlatState

Array = Any
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Hyper:
    """The fixed numbers of AdamW; the learning rate comes with each step."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


class AdamW:
    """First and second moments for every element; matrices decay, other arrays do not.

    count   updates made so far; a skipped step does not count
    """

    def __init__(self, flat: FlatState, hyper: Hyper) -> None:
        self.flat, self.hyper, self.count = flat, hyper, 0
        self.m = flat.ops.zeros((flat.size,))
        self.v = flat.ops.zeros((flat.size,))

    def square_norm(self, part: int, parts: int) -> float:
        """This rank's share of Σ g² over unique elements.

        Ranks of the data axis hold equal gradients: each counts its own part of them.
        Elements that another tp rank owns are left out.
        """
        lo, hi = (self.flat.size * i // parts for i in (part, part + 1))
        total = 0.0
        for owner, start, stop in self.flat.ranges(lambda p: p.owner):
            start, stop = max(lo, start), min(hi, stop)
            if owner and start < stop:
                total += self.flat.ops.square_sum(self.flat.grad[start:stop])
        return total

    def clip_factor(self, norm: float) -> float:
        """What gradients are multiplied by so that their norm is at most `clip`."""
        if not self.hyper.clip:
            return 1.0
        return min(1.0, self.hyper.clip / (norm + CLIP_EPS))

    def update(self, lr: float, norm: float) -> bool:
        """One update; False, and nothing changed, where the norm is not finite."""
        if not math.isfinite(norm):
            return False
        self.count += 1
        h = self.hyper
        for decays, lo, hi in self.flat.ranges(lambda p: p.decays):
            self.flat.ops.adamw(
                self.flat.data[lo:hi],
                self.flat.grad[lo:hi],
                self.m[lo:hi],
                self.v[lo:hi],
                lr=lr,
                beta1=h.beta1,
                beta2=h.beta2,
                eps=h.eps,
                decay=h.weight_decay if decays else 0.0,
                step=self.count,
                scale=self.clip_factor(norm),
            )
        self.flat.refresh()
        return True
