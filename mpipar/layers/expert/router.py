"""The router: which experts each token takes, and with which weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.comm.layout import R, S
from mpipar.layers.base import Step
from mpipar.layers.cost import Cost, move
from mpipar.layers.expert.choice import choose, spread
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops

Array = Any
# Added to sums of sigmoids, which may all be 0
TINY = 1e-20


@dataclass(slots=True)
class RouterSaved:
    """Logits (t, e), experts and gates (t, k) of the tokens; which choices are taken
    (t, k), and the shares (b, e) of experts in all choices, on the host, where
    something is dropped or balanced."""

    logits: Array
    chosen: np.ndarray
    gates: Array
    kept: np.ndarray | None
    shares: np.ndarray | None
    step: Step


@dataclass(slots=True)
class RouterLeft:
    """What the weight gradient needs."""

    dz: Array
    x: Array


class Router:
    """Gates of the k experts of each token by its logits z = x Wᵀ, in fp32 or better.

    top_softmax  g = softmax of the chosen z       dz = g∘(dg − Σg·dg) of those chosen
    softmax      g = p of those chosen, p =        dz = p∘(dp − Σp·dp), of all experts
                 softmax(z)
    sigmoid      g = s / Σs of those chosen,       ds = (dg − Σg·dg) / Σs,
                 s = σ(z); g = s where k = 1       dz = ds·s·(1 − s)

    and all gates times `scale`. Experts are chosen by p or s plus a bias, which reaches
    no gate. To the loss, a mean over tokens, each adds a mean over sequences of

    balance · e · Σ_e f·P    f the share of choices that fell on an expert, constant
                             in backward; P the mean of p, or of s / Σ_e s
    z_loss · mean LSE(z)²    over tokens

    which depend on no layout, as a sequence is the same in all of them. No loss reaches
    the bias: updates move it against the loads of the step.

    Shapes    x (t, d) tokens of this rank;  W (e, d) and bias (e,) on every rank
    Saves     (e + k) items and 8·k bytes a token; with balance or capacity 8·e bytes a
              sequence, and k more a token where any is dropped
    Moves     as `spread`, with balance or capacity
    Flops     2·t·d·e
    Precision logits, scores and gates at least fp32
    Source    Shazeer et al. 2017; Fedus et al. 2021 (balance); Zoph et al. 2022
              (z_loss); Jiang et al. 2024 (top_softmax); Wang et al. 2024 (bias);
              DeepSeek-V3, 2412.19437 (sigmoid, loss of each sequence)

    rules     the [experts] section
    partial   axis over which the gradient is a summand;  owner  as of a parameter
    speaks    False on ranks whose tokens another rank counts
    """

    def __init__(
        self,
        name: str,
        width: int,
        rules: Any,
        *,
        ops: Ops,
        std: float,
        partial: str,
        owner: bool,
        speaks: bool,
        sequence: Sequence[Any],
    ) -> None:
        self.name, self.rules, self.ops = name, rules, ops
        self.speaks, self.sequence = speaks, sequence
        shared = {"partial": partial, "owner": owner}
        shape = (rules.count, width)
        self.weight = Parameter(
            f"{name}.weight", shape, tuple((0, n) for n in shape), "normal", std,
            **shared,
        )  # fmt: skip
        self.bias = None
        if rules.bias_rate:
            count = rules.count
            self.bias = Parameter(
                f"{name}.bias", (count,), ((0, count),), "zeros", **shared
            )

    def parameters(self) -> Iterator[Parameter]:
        """The weight, and the bias where there is one."""
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def forward(
        self, x: Array, positions: np.ndarray, step: Step, shape: tuple[int, int]
    ) -> RouterSaved:
        """x (t, d), t = b·s;  positions (s,) on the host;  shape  (b, s)"""
        rules, ops = self.rules, self.ops
        logits = ops.xp.matmul(ops.wide(x), ops.wide(self.weight.data).T)
        scores = self._scores(logits)
        by = scores if self.bias is None else scores + ops.wide(self.bias.data)
        chosen = choose(
            ops.to_host(by),
            rules.active,
            groups=rules.groups,
            active_groups=rules.active_groups,
        )
        gates = self._gates(logits, scores, ops.asarray(chosen))
        kept = shares = None
        length = step.length or shape[1]
        capacity = rules.capacity if step.cache is None else 0.0
        real = _real(positions, step, len(chosen))
        if capacity or (rules.balance and step.training):
            kept, shares = spread(
                chosen.reshape(*shape, -1), positions, rules.count, length, capacity,
                self.sequence,
            )  # fmt: skip
            kept = kept.reshape(chosen.shape)
        elif real is not None:
            kept = np.tile(real[:, None], rules.active)
        if kept is not None and kept.all():
            kept = None
        elif kept is not None:
            gates = gates * ops.asarray(kept)
        return RouterSaved(logits, chosen, gates, kept, shares, step)

    def backward(
        self, dgates: Array, saved: RouterSaved, positions: np.ndarray
    ) -> Array:
        """dz (t, e) of gradients of the gates (t, k), its own losses added."""
        rules, xp = self.rules, self.ops.xp
        scores, chosen = self._scores(saved.logits), self.ops.asarray(saved.chosen)
        if saved.kept is not None:
            dgates = dgates * self.ops.asarray(saved.kept)
        dgates = dgates * rules.scale
        ds = xp.zeros_like(scores)
        if rules.router == "softmax":
            xp.put_along_axis(ds, chosen, dgates, axis=1)
        elif rules.router == "sigmoid":
            own = xp.take_along_axis(scores, chosen, axis=1)
            if rules.active > 1:
                total = own.sum(axis=1, keepdims=True) + TINY
                dgates -= (own / total * dgates).sum(axis=1, keepdims=True)
                dgates /= total
            xp.put_along_axis(ds, chosen, dgates, axis=1)
        if self.speaks and rules.balance and saved.shares is not None:
            ds += self._balance(scores, saved, positions)
        dz = self._scores_backward(ds, scores)
        if rules.router == "top_softmax":
            gates = self._gates(saved.logits, scores, chosen) / rules.scale
            dgates = gates * (dgates - (gates * dgates).sum(axis=1, keepdims=True))
            own = xp.take_along_axis(dz, chosen, axis=1) + dgates
            xp.put_along_axis(dz, chosen, own, axis=1)
        if self.speaks and rules.z_loss:
            dz += self._z_loss(saved, positions)
        return dz

    def backward_weight(self, left: RouterLeft) -> None:
        """Adds to the gradient of the weight."""
        ops = self.ops
        ops.add_to(self.weight.grad, ops.xp.matmul(left.dz.T, ops.wide(left.x)))

    def loads(self, saved: RouterSaved, positions: np.ndarray) -> np.ndarray:
        """How many choices of this rank's tokens fell on each expert."""
        real = _real(positions, saved.step, len(saved.chosen))
        chosen = saved.chosen if real is None else saved.chosen[real]
        return np.bincount(chosen.reshape(-1), minlength=self.rules.count)

    def cost(self, batch: int, positions: int) -> Cost:
        """Of so many positions of so many sequences."""
        width, rules = self.weight.shape[1], self.rules
        item, tokens = self.ops.dtype.itemsize, batch * positions
        saved, gathers = tokens * (rules.count + rules.active) * item, Cost()
        saved += tokens * 8 * rules.active
        if rules.capacity or rules.balance:
            saved += 8 * batch * rules.count
            nbytes = 4 * positions * (batch * rules.active + 1)
            for axis in self.sequence:
                nbytes *= axis.size
                gathers += move(axis.name, axis.size, S(0), R, nbytes)
        return gathers + Cost(
            flops=2 * tokens * width * rules.count,
            saved=saved,
            left=tokens * rules.count * item,
        )

    def _scores(self, logits: Array) -> Array:
        xp = self.ops.xp
        if self.rules.router == "sigmoid":
            # Both forms of 1 / (1 + e⁻ᶻ), of which neither overflows
            small = xp.exp(-xp.abs(logits))
            return xp.where(logits >= 0, 1 / (1 + small), small / (1 + small))
        return _softmax(logits, xp)

    def _scores_backward(self, ds: Array, scores: Array) -> Array:
        if self.rules.router == "sigmoid":
            return ds * scores * (1 - scores)
        return scores * (ds - (scores * ds).sum(axis=1, keepdims=True))

    def _gates(self, logits: Array, scores: Array, chosen: Array) -> Array:
        rules, xp = self.rules, self.ops.xp
        if rules.router == "top_softmax":
            gates = _softmax(xp.take_along_axis(logits, chosen, axis=1), xp)
        else:
            gates = xp.take_along_axis(scores, chosen, axis=1)
            if rules.router == "sigmoid" and rules.active > 1:
                gates = gates / (gates.sum(axis=1, keepdims=True) + TINY)
        return gates * self.ops.dtype.type(rules.scale)

    def _balance(
        self, scores: Array, saved: RouterSaved, positions: np.ndarray
    ) -> Array:
        """Gradient of the balance loss in scores."""
        rules, xp, dtype = self.rules, self.ops.xp, scores.dtype
        b = len(saved.shares)
        weight = rules.balance * rules.count * self._mean(saved, positions)
        dp = self.ops.asarray((saved.shares * weight).astype(dtype))
        dp = xp.repeat(dp, len(scores) // b, axis=0)
        if rules.router == "sigmoid":
            total = scores.sum(axis=1, keepdims=True) + TINY
            dp = (dp - (scores / total * dp).sum(axis=1, keepdims=True)) / total
        real = _real(positions, saved.step, len(dp))
        return dp if real is None else dp * self.ops.asarray(real)[:, None]

    def _z_loss(self, saved: RouterSaved, positions: np.ndarray) -> Array:
        """Gradient of the mean square of LSE(z) in z."""
        xp, logits = self.ops.xp, saved.logits
        top = logits.max(axis=1, keepdims=True)
        lse = top + xp.log(xp.exp(logits - top).sum(axis=1, keepdims=True))
        weight = 2 * self.rules.z_loss * self._mean(saved, positions)
        dz = logits.dtype.type(weight) * lse * _softmax(logits, xp)
        real = _real(positions, saved.step, len(dz))
        return dz if real is None else dz * self.ops.asarray(real)[:, None]

    def _mean(self, saved: RouterSaved, positions: np.ndarray) -> float:
        """What one token counts in a mean over all tokens of a step."""
        step = saved.step
        return step.loss_scale / (step.sequences * (step.length or positions.size))


def _softmax(z: Array, xp: Any) -> Array:
    p = xp.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p


def _real(positions: np.ndarray, step: Step, tokens: int) -> np.ndarray | None:
    """Which of the tokens, of sequences at these positions, are no padding; None = all
    are."""
    if not step.length or not positions.size or positions[-1] < step.length:
        return None
    return np.tile(positions < step.length, tokens // positions.size)
