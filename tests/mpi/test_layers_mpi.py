"""Layers cut over tp: equal to the serial layer, with the messages they state."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from layer_cases import (
    BATCH,
    CASES,
    FFN,
    HEADS,
    VOCABULARY_CASES,
    Case,
    Made,
    Spy,
    attention,
    dropout,
    head,
    make_step,
    row,
    upstream,
)
from numeric import assert_close

from mpipar.comm import Communicator, Counters
from mpipar.comm.null import NullCommunicator
from mpipar.grid import Grid
from mpipar.layers.base import nbytes

S = 12  # every number of ranks used here divides it
SERIAL = NullCommunicator("tp")


def on_ranks(n, *values, name=None):
    """Parameters of a test that runs on n ranks."""
    return pytest.param(*values, marks=pytest.mark.mpi(n), id=name or f"{n} ranks")


def cases_on(*sizes, cases=CASES):
    return [on_ranks(n, case, name=f"{case} on {n}") for n in sizes for case in cases]


ranks = pytest.mark.parametrize("n", [on_ranks(n, n) for n in (2, 4)])
every = pytest.mark.parametrize(
    "case", cases_on(2, 4) + cases_on(3, cases=VOCABULARY_CASES)
)
sequence_or_not = pytest.mark.parametrize("sequence", [False, True], ids=["R", "S"])


def axis(comm):
    return Communicator(comm, "tp", Counters())


@dataclass
class Run:
    """A layer after forward and backward on its part of a serial input."""

    made: Made
    y: Any
    dx: Any
    held: int


def run(case, tp, s, sequence=False, dy=None):
    """Forward and backward; dy is the upstream gradient of the serial layer."""
    made = Made(case, tp, s, sequence=sequence)
    y, saved = made.layer.forward(made.part(case.enters, made.x()), made.step)
    held = nbytes(saved)
    dy = upstream(y) if dy is None else made.part(case.leaves, dy)
    return Run(made, y, made.layer.backward(dy, saved), held)


def serial_and_cut(case, tp, s, sequence):
    serial = run(case, SERIAL, s)
    return serial, run(case, tp, s, sequence, upstream(serial.y))


@every
@sequence_or_not
def test_a_cut_layer_is_the_serial_layer_and_costs_what_it_states(
    comm, case, sequence
):
    tp = axis(comm)
    serial, cut = serial_and_cut(case, tp, S, sequence)
    table = tp.counters.since().get("tp", {})
    compare(serial, cut, tp)
    cost = cut.made.layer.cost(BATCH, S)
    assert case.holds(cut.held, cost.saved)
    for field, stated in (("calls", cost.calls), ("bytes", cost.moved)):
        counted = {("tp", op): line[field] for op, line in table.items()}
        assert counted == dict(stated), field


@pytest.mark.parametrize(
    "case", cases_on(2, 4, cases=[c for c in CASES if c.is_model or c.width == 16])
)
@pytest.mark.parametrize("s", [1, 7])
def test_odd_lengths_are_as_good(comm, case, s):
    """A12"""
    tp = axis(comm)
    compare(*serial_and_cut(case, tp, s, sequence=False), tp)


def compare(serial, cut, tp):
    """Output, input gradient and parameter gradients against one rank's."""
    case = serial.made.case
    if case.leaves == "loss":
        assert cut.y == pytest.approx(serial.y, rel=1e-12)
        assert len(set(tp.all_gather_obj(cut.y))) == 1
    else:
        assert_close(cut.y, cut.made.part(case.leaves, serial.y), 1e-12, "y")
    if serial.dx is None:
        assert cut.dx is None
    else:
        assert_close(cut.dx, cut.made.part(case.enters, serial.dx), 1e-12, "dx")
    whole = serial.made.flat.parameters
    # A gradient that is zero but for rounding is judged beside the others.
    least = 1e-3 * np.abs(serial.made.flat.grad).max(initial=0.0)
    for p, q in zip(cut.made.flat.parameters, whole, strict=True):
        assert p.name == q.name
        box = tuple(slice(*interval) for interval in p.box)
        scale = max(least, np.abs(q.grad[box]).max(initial=0.0))
        error = np.abs(complete_gradient(p, tp) - q.grad[box])
        assert error.max(initial=0.0) <= 1e-12 * scale, p.name


def complete_gradient(p, tp):
    """The gradient summed over copies where it is partial; else all copies agree."""
    everywhere = tp.all_gather_obj((p.box, p.owner, p.grad))
    copies = [rank for rank, (box, _, _) in enumerate(everywhere) if box == p.box]
    owners = [everywhere[rank][1] for rank in copies]
    grads = [everywhere[rank][2] for rank in copies]
    # Copies are neighbours, and exactly one of them counts in norms.
    assert copies == list(range(copies[0], copies[0] + len(copies)))
    assert owners == [True] + [False] * (len(copies) - 1)
    if not p.partial:
        assert all(np.array_equal(g, p.grad) for g in grads)
        return p.grad
    assert p.partial == "kv" or (p.partial == "tp" and len(copies) == tp.size)
    return sum(grads)


@ranks
@sequence_or_not
def test_work_is_shared_evenly(comm, n, sequence):
    tp = axis(comm)
    for case in CASES:
        whole = Made(case, SERIAL, S).layer.cost(BATCH, S).flops
        mine = Made(case, tp, S, sequence=sequence).layer.cost(BATCH, S).flops
        total = sum(tp.all_gather_obj(mine))
        # Copied key and value heads are work that every copy does, and so is routing.
        has_copies = any(
            p.partial == "kv" or p.name.endswith("router.weight")
            for p in Made(case, tp, S).flat.parameters
        )
        assert total > whole if has_copies else total == whole, case.name


# --- bias, masks, vocabulary ----------------------------------------------------------


@ranks
@sequence_or_not
def test_a_row_cut_bias_is_added_once_and_its_gradient_counts_tokens(
    comm, n, sequence
):
    """A03"""
    tp = axis(comm)
    made = Made(Case("", row(True)), tp, S, sequence=sequence)
    bias, s = made.layer.bias, 12
    y, saved = made.layer.forward(np.zeros((1, s, FFN // n)), made.step)
    assert y.shape[1] == (s // n if sequence else s)
    assert np.array_equal(y, np.broadcast_to(bias.data, y.shape))
    # Six tokens have a gradient.
    ones = np.zeros((1, s, y.shape[2]))
    ones[:, ::2] = 1.0
    made.layer.backward(made.part("stream", ones), saved)
    assert np.array_equal(complete_gradient(bias, tp), np.full(bias.shape, 6.0))


def mask_of(tp, replica, sequence):
    """This rank's residual dropout factors; a dp replica has samples of its own."""
    made = Made(Case("", dropout(0.5)), tp, S, sequence=sequence)
    step = make_step(S, samples=np.array([0, 1]) + 2 * replica)
    ones = made.part("stream", np.ones((BATCH, S, 5000)))
    return made, made.layer.forward(ones, step)[0]


@pytest.mark.mpi(4)
def test_residual_masks_are_equal_inside_tp_and_differ_over_dp(comm):
    """A08"""
    with Grid(comm, {"tp": 2, "dp": 2}) as grid:
        _, mask = mask_of(grid.tp, grid.dp.rank, sequence=False)
    masks = comm.allgather(mask)
    assert np.array_equal(masks[0], masks[1]) and np.array_equal(masks[2], masks[3])
    assert 0.45 < (masks[0] == masks[2]).mean() < 0.55
    assert abs((mask != 0).mean() - 0.5) < 0.02


@pytest.mark.mpi(4)
def test_masks_of_sequence_slices_differ_and_are_the_serial_mask(comm):
    """A08"""
    with Grid(comm, {"tp": 2, "dp": 2}) as grid:
        made, mask = mask_of(grid.tp, grid.dp.rank, sequence=True)
        _, whole = mask_of(SERIAL, grid.dp.rank, sequence=False)
        first, second = grid.tp.all_gather_obj(mask)
    assert np.array_equal(mask, made.part("stream", whole))
    assert 0.45 < (first == second).mean() < 0.55


@ranks
@sequence_or_not
def test_attention_masks_of_heads_differ_and_are_the_serial_masks(comm, n, sequence):
    """A08"""
    case = Case("", attention(dropout=0.5))
    factors = []
    for tp, cut in ((axis(comm), sequence), (SERIAL, False)):
        made = Made(case, tp, S * 8, sequence=cut, ops=Spy("float64"))
        made.layer.forward(made.part("stream", made.x()), made.step)
        factors.append(made.ops.factors)
    mine, whole = factors
    held = slice(comm.rank * HEADS // n, (comm.rank + 1) * HEADS // n)
    assert np.array_equal(mine, whole[:, held])
    heads = np.concatenate(comm.allgather(mine), axis=1)
    for i in range(HEADS):
        for other in range(i):
            assert 0.45 < (heads[:, i] == heads[:, other]).mean() < 0.55


@pytest.mark.parametrize("n", [on_ranks(n, n) for n in (2, 3, 4)])
@sequence_or_not
def test_an_uneven_vocabulary_has_no_padding(comm, n, sequence):
    """A11"""
    tp = axis(comm)
    made = Made(Case("", head_of_101), tp, S, sequence=sequence)
    weight = made.layer.projection.weight.parts[0]
    rows = tp.all_gather_obj(weight.data.shape[0])
    assert sum(rows) == 101 and max(rows) - min(rows) == 1
    weight.data[...] = 0.0
    total, saved = made.layer.forward(made.part("stream", made.x()), made.step)
    assert total / made.step.valid == pytest.approx(math.log(101), rel=1e-14)
    made.layer.backward(None, saved)
    # Softmax less one-hot adds up to zero over the vocabulary, for every token.
    total = tp.all_reduce(weight.grad.sum(axis=0))
    assert np.abs(total).max() < 1e-14


def head_of_101(**shared):
    return head(**shared, vocab=101)


@pytest.mark.parametrize("n", [on_ranks(n, n) for n in (2, 3, 4)])
def test_generation_gets_whole_logits_on_every_rank(comm, n):
    found = []
    for tp in (axis(comm), SERIAL):
        made = Made(Case("", head_of_101), tp, S)
        found.append(made.layer.logits(made.x(), make_step(S, labels=None)))
    assert found[0].shape == (BATCH, 101)
    assert_close(found[0], found[1], 1e-12)
    assert len({x.tobytes() for x in comm.allgather(found[0])}) == 1
