"""A mixture of experts in place of a block's MLP."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.comm import NullCommunicator
from mpipar.layers.base import Branch, Step
from mpipar.layers.cost import Cost
from mpipar.layers.expert.cut import ExpertCut, OwnTokens, Summands
from mpipar.layers.expert.dispatch import Dispatch, Plan, make_plan
from mpipar.layers.expert.router import Router, RouterLeft, RouterSaved
from mpipar.layers.parameter import Parameter
from mpipar.layers.stream import Stream
from mpipar.layers.tensor.one_d import LinearSaved
from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class PartSaved:
    """One part of the tokens: its plan, what each expert saved (None where it had no
    rows), and the rows (n, d) that came back."""

    plan: Plan
    experts: list[Any]
    outputs: Array


@dataclass(slots=True)
class MixtureSaved:
    """Input, routing, the parts of the tokens, and what the shared experts saved."""

    inputs: LinearSaved
    router: RouterSaved
    parts: list[PartSaved]
    shared: Any


@dataclass(slots=True)
class MixtureLeft:
    """What the weight gradients of router, experts (by part) and shared need."""

    router: RouterLeft
    parts: list[list[Any]]
    shared: Any


class Mixture(Branch):
    """y = Σ_k gate_k · expert_k(x) + shared(x), over the k experts that a token takes.

    A rank of ep has e/ep whole experts; rows of tokens travel to them and back. With
    `cut.shared` the inner width of each is cut over tp too: every rank of tp has all
    tokens and a summand of their outputs, which are added up as those of an MLP.
    Otherwise the ranks of tp are part of ep and have tokens of their own.

    Shapes    x, y (b, s/u, d)  stream layout; here t = b·s tokens, or b·s/tp own ones
    Backward  of what is linear in the outputs; router as `Router`; all gradients of
              router and, where it is cut over tp, of x are summands over tp
    Saves     x; the rows of own experts as their MLPs do; outputs, t·k·d items; plans,
              16·t·k bytes, and 8·t·k more where ep > 1; what the router does
    Moves     of rows, 4 times (ep−1)/ep·t·k·d items under even loads, and one
              all-to-all of 8·e bytes; the stream's moves as ColumnLinear and RowLinear
    Flops     of k experts a token, of shared, and of the router
    Precision rows travel in the operand type, outputs in the compute type
    Source    Shazeer et al. 2017; Lepikhin et al. 2020; Jiang et al. 2024

    make(name, stream, scale) → an MLP of `scale` times an expert's inner width
    """

    def __init__(
        self,
        name: str,
        router: Router,
        make: Callable[[str, Stream, int], Branch],
        *,
        ops: Ops,
        stream: Stream,
        cut: ExpertCut,
    ) -> None:
        self.name, self.router, self.ops, self.stream = name, router, ops, stream
        self.tokens = stream if cut.shared else OwnTokens(stream)
        self.dispatch, self.parts = Dispatch(ops, cut.ep), 2 if cut.overlap else 1
        self.count = router.rules.count
        each = self.count // cut.ep.size
        inside = Summands(stream.tp if cut.shared else NullCommunicator("tp"))
        first = cut.ep.rank * each
        self.experts = [
            make(f"{name}.experts.{number}", inside, 1)
            for number in range(first, first + each)
        ]
        for expert in self.experts:
            for p in expert.parameters():
                p.axis = "edp"
        self.shared = None
        if router.rules.shared:
            self.shared = make(f"{name}.shared", stream, router.rules.shared)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.router.parameters()
        for expert in self.experts:
            yield from expert.parameters()
        if self.shared is not None:
            yield from self.shared.parameters()

    def forward(
        self, x: Array, step: Step, onto: Array | None = None
    ) -> tuple[Array, MixtureSaved]:
        ops = self.ops
        inputs = LinearSaved(ops.operand(x))
        own = self.tokens.leave(inputs.x)
        shape, rows = own.shape, own.reshape(-1, own.shape[-1])
        routed = self.router.forward(rows, self._positions(step), step, shape[:2])
        cuts = self._cuts(len(rows))
        plans = [self._plan(routed, part) for part in cuts]
        sent = [
            self.dispatch.send_start(
                ops.gather_rows(rows[part], ops.asarray(plan.tokens)), plan
            )
            for part, plan in zip(cuts, plans, strict=True)
        ]
        returning, kept = [], []
        for handle, plan in zip(sent, plans, strict=True):
            arrived = self.dispatch.arrived(handle, plan)
            outputs, saved = self._run(arrived, plan, step)
            returning.append(self.dispatch.give_back_start(outputs, plan))
            kept.append(saved)
        shared = None
        if self.shared is not None:
            # While rows are on their way back
            onto, shared = self.shared.forward(inputs.x, step, onto)
            shared.inputs = inputs
        y, parts = ops.zeros(rows.shape), []
        for part, plan, handle, saved in zip(cuts, plans, returning, kept, strict=True):
            outputs = handle.wait()
            self.dispatch.collect(outputs, plan, routed.gates[part], y[part])
            parts.append(PartSaved(plan, saved, outputs))
        y = ops.add_residual(self.tokens.enter(y.reshape(shape)), None, onto)
        return y, MixtureSaved(inputs, routed, parts, shared)

    def backward_input(
        self, dy: Array, saved: MixtureSaved
    ) -> tuple[Array, MixtureLeft]:
        ops, routed = self.ops, saved.router
        own_dy = self.tokens.enter_backward(ops.operand(dy))
        shape, dys = own_dy.shape, own_dy.reshape(-1, own_dy.shape[-1])
        cuts = self._cuts(len(dys))
        dgates, sent = ops.zeros(routed.gates.shape), []
        for part, its in zip(cuts, saved.parts, strict=True):
            rows = self._gated(dys[part], routed.gates[part], its, dgates[part])
            sent.append(self.dispatch.send_start(rows, its.plan))
        returning, left = [], []
        for handle, its in zip(sent, saved.parts, strict=True):
            arrived = self.dispatch.arrived(handle, its.plan)
            dx, needs = self._run_backward(arrived, its)
            returning.append(self.dispatch.give_back_start(dx, its.plan))
            left.append(needs)
        # Meanwhile, what needs no rows
        more = shared = None
        if self.shared is not None:
            more, shared = self.shared.backward_input(dy, saved.shared)
        positions = self._positions(routed.step)
        dz = self.router.backward(dgates, routed, positions)
        dx = ops.xp.matmul(dz, ops.wide(self.router.weight.data))
        for part, its, handle in zip(cuts, saved.parts, returning, strict=True):
            self.dispatch.collect(handle.wait(), its.plan, None, dx[part])
        dx = self.tokens.leave_backward(dx.reshape(shape))
        dx = ops.add_residual(dx, None, more)
        x = self.tokens.leave(saved.inputs.x).reshape(dys.shape)
        self._count(routed, positions)
        return dx, MixtureLeft(RouterLeft(dz, x), left, shared)

    def backward_weight(self, left: MixtureLeft) -> None:
        self.router.backward_weight(left.router)
        for part in left.parts:
            for expert, needs in zip(self.experts, part, strict=True):
                if needs is not None:
                    expert.backward_weight(needs)
        if self.shared is not None:
            self.shared.backward_weight(left.shared)

    def forget(self) -> None:
        for expert in self.experts:
            expert.forget()
        if self.shared is not None:
            self.shared.forget()

    def _cuts(self, tokens: int) -> list[slice]:
        """The parts of the tokens, which travel one after the other."""
        bounds = [tokens * i // self.parts for i in range(self.parts + 1)]
        return [slice(lo, hi) for lo, hi in zip(bounds, bounds[1:], strict=False)]

    def _positions(self, step: Step) -> np.ndarray:
        """Those of the own tokens on the host, which waits for them once a step."""
        key = "positions", type(self.tokens)
        if key not in step.kept:
            positions = step.positions
            if isinstance(self.tokens, OwnTokens):
                positions = self.tokens.positions(positions)
            step.kept[key] = self.ops.to_host(positions)
        return step.kept[key]

    def _plan(self, routed: RouterSaved, part: slice) -> Plan:
        kept = None if routed.kept is None else routed.kept[part]
        return make_plan(routed.chosen[part], kept, self.count, self.dispatch.ep)

    def _run(self, rows: Array, plan: Plan, step: Step) -> tuple[Array, list[Any]]:
        """Own experts on their rows (m, d)."""
        outputs, kept = self.ops.xp.empty(rows.shape, self.ops.dtype), []
        for expert, lo, hi in self._bounds(plan):
            saved = None
            if lo < hi:
                y, saved = expert.forward(rows[None, lo:hi], step)
                outputs[lo:hi] = y[0]
            kept.append(saved)
        return outputs, kept

    def _run_backward(self, dys: Array, its: PartSaved) -> tuple[Array, list[Any]]:
        dx, left = self.ops.xp.empty(dys.shape, self.ops.dtype), []
        bounds = self._bounds(its.plan)
        for (expert, lo, hi), saved in zip(bounds, its.experts, strict=True):
            needs = None
            if lo < hi:
                d, needs = expert.backward_input(dys[None, lo:hi], saved)
                dx[lo:hi] = d[0]
            left.append(needs)
        return dx, left

    def _bounds(self, plan: Plan) -> Iterator[tuple[Branch, int, int]]:
        bounds = plan.bounds.tolist()
        return zip(self.experts, bounds, bounds[1:], strict=False)

    def _gated(self, dys: Array, gates: Array, its: PartSaved, dgates: Array) -> Array:
        """Gradients of the outputs (n, d); those of the gates are put in `dgates`."""
        ops, plan = self.ops, its.plan
        tokens = ops.asarray(plan.tokens)
        slots = np.empty(len(plan.tokens), np.int64)
        taken = plan.rows < len(slots)
        slots[plan.rows[taken]] = np.nonzero(taken)[1]
        return ops.combine_rows_bwd(
            dys, its.outputs, tokens, ops.asarray(slots), gates, dgates=dgates
        )

    def _count(self, routed: RouterSaved, positions: np.ndarray) -> None:
        """Adds this rank's loads to those of the step."""
        found = routed.step.loads
        if found is None or not self.router.speaks:
            return
        loads, dropped = self.router.loads(routed, positions), 0
        if routed.kept is not None:
            dropped = loads.sum() - np.count_nonzero(routed.kept)
        found[self.name] = found.get(self.name, 0) + np.append(loads, dropped)

    def cost(self, batch: int, sequence: int) -> Cost:
        """Under even loads."""
        ep, rules, ops = self.dispatch.ep, self.router.rules, self.ops
        width, own = self.router.weight.shape[1], batch * sequence
        if isinstance(self.tokens, OwnTokens):
            own //= self.stream.tp.size
        rows = own * rules.active
        item, operand = ops.dtype.itemsize, ops.operand_dtype.itemsize
        held = self.stream.tokens(batch, sequence) * width * operand
        plans = (
            8 * rows * (2 + (ep.size > 1)) + 8 * (len(self.experts) + 1) * self.parts
        )
        total = Cost(
            saved=held + rows * width * item + plans, left=own * width * operand
        )
        total += self.router.cost(batch, own // batch)
        # As much as one expert that all rows come to
        total += self.experts[0].cost(1, rows)
        nbytes = batch * sequence * width
        total += self.tokens.leave_cost(nbytes * operand, nbytes * item)
        total += self.tokens.enter_cost(nbytes * item, nbytes * operand)
        total += self.tokens.again_cost(nbytes * operand)
        if self.shared is not None:
            # It has the same input
            twice = Cost(saved=-held, left=-own * width * operand)
            total += self.shared.cost(batch, sequence) + twice
        if ep.size == 1:
            return total
        key = ep.name, "all_to_all"
        moved = rows * width * 2 * (item + operand) + self.parts * self.count * 8
        return total + Cost(
            calls=Counter({key: 5 * self.parts}),
            moved=Counter({key: moved * (ep.size - 1) // ep.size}),
        )
