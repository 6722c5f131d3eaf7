"""AdamW over flat pieces, with clipping by the true global norm."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.ops import Ops
from mpipar.zero.flat import Piece

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
    """First and second moments of this rank's pieces; matrices decay, others do not.

    m, v    (Σ sizes of the pieces,)
    count   updates made so far; a skipped step does not count
    """

    def __init__(self, pieces: Sequence[Piece], ops: Ops, hyper: Hyper) -> None:
        self.pieces, self.ops, self.hyper, self.count = list(pieces), ops, hyper, 0
        size = sum(piece.end - piece.begin for piece in pieces)
        self.m, self.v = ops.zeros((size,)), ops.zeros((size,))

    def moments(self) -> tuple[list[Array], list[Array]]:
        """m and v, as a view for each piece."""
        m, v, base = [], [], 0
        for piece in self.pieces:
            kept = slice(base, base + piece.end - piece.begin)
            m.append(self.m[kept])
            v.append(self.v[kept])
            base = kept.stop
        return m, v

    def square_norm(self) -> float:
        """This rank's share of Σ g² over unique elements.

        Of a piece that several ranks hold each counts its own part. Padding and
        elements that another tp rank owns are left out.
        """
        own = []
        for piece in self.pieces:
            for owner, start, stop in piece.unit.runs(lambda p: p.owner, *piece.share):
                if owner:
                    own.append(piece.grad[start - piece.begin : stop - piece.begin])
        return self.ops.square_sums(own)

    def clip_factor(self, norm: float) -> float:
        """What gradients are multiplied by so that their norm is at most `clip`."""
        if not self.hyper.clip:
            return 1.0
        return min(1.0, self.hyper.clip / (norm + CLIP_EPS))

    def update(self, lr: float, norm: float, loss_scale: float = 1.0) -> bool:
        """One update; False, and nothing changed, where the norm is not finite.

        norm         global, of the gradients of the loss itself
        loss_scale   what the gradients held are multiplied by
        """
        if not math.isfinite(norm):
            return False
        self.count += 1
        h = self.hyper
        for decays, arrays, rounded in self._runs():
            self.ops.adamw(
                *arrays,
                lr=lr,
                beta1=h.beta1,
                beta2=h.beta2,
                eps=h.eps,
                decay=h.weight_decay if decays else 0.0,
                step=self.count,
                scale=self.clip_factor(norm) / loss_scale,
                rounded=rounded,
            )
        return True

    def move(self, moves: Mapping[str, np.ndarray]) -> None:
        """Adds what is given by name to parameters that no loss reaches."""
        for piece in self.pieces:
            for p, lo, hi in piece.unit.places():
                begin, end = max(lo, piece.begin), min(hi, piece.end)
                if p.name in moves and begin < end:
                    own = slice(begin - piece.begin, end - piece.begin)
                    move = moves[p.name].reshape(-1)[begin - lo : end - lo]
                    piece.data[own] += self.ops.asarray(move.astype(self.ops.dtype))
                    if piece.rounded is not None:
                        self.ops.store(piece.data[own], piece.rounded[own])

    def _runs(self) -> Iterator[tuple[bool, list[Array], Array]]:
        """Values, gradients and moments of neighbours that all decay, or all do not,
        and the 16-bit values, if there are any."""
        for piece, m, v in zip(self.pieces, *self.moments(), strict=True):
            runs = piece.unit.runs(lambda p: p.decays, piece.begin, piece.end)
            for decays, lo, hi in runs:
                own = slice(lo - piece.begin, hi - piece.begin)
                rounded = None if piece.rounded is None else piece.rounded[own]
                arrays = [piece.data[own], piece.grad[own], m[own], v[own]]
                yield decays, arrays, rounded
