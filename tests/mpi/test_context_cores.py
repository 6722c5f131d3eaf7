"""Attention over a cut sequence, by every method: the numbers of one rank."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from context_cases import (
    DOCUMENTS,
    LENGTH,
    Problem,
    alone,
    attend,
    every_cut,
    sequence_of,
)
from layer_cases import (
    BATCH,
    CONTEXT,
    RATE,
    Case,
    Made,
    attention,
    model,
    upstream,
)
from numeric import assert_close

from mpipar.comm import Communicator, NullCommunicator
from mpipar.grid import Grid
from mpipar.layers.base import nbytes as nbytes_of

MASKS = {
    "causal": {},
    "window": {"window": 30},
    "documents": {"documents": DOCUMENTS},
    "window in documents": {"window": 9, "documents": DOCUMENTS},
}
every = pytest.mark.parametrize("method, n, asked", every_cut())


@pytest.fixture
def grid(comm):
    with Grid(comm, {"cp": comm.size}) as grid:
        yield grid


def heads_for(n):
    """Heads that every method can share among n ranks."""
    return 6 if n == 3 else 8


def compare(problem, sequence, tolerance=1e-12):
    """Outputs and gradients of this rank beside those of one rank."""
    whole, own = alone(problem), sequence.own
    mine = attend(problem, sequence.core, own)
    assert_close(mine.o, whole.o[:, own], tolerance, "o")
    for name, x, y in zip("qkv", mine.grads, whole.grads, strict=True):
        scale = np.abs(y).max()
        assert np.abs(x - y[:, own]).max() <= tolerance * scale, f"d{name}"


@every
@pytest.mark.parametrize("mask", MASKS)
def test_every_core_is_attention_on_one_rank(grid, method, n, asked, mask):
    """A10: for all kinds of heads, with and without dropout."""
    some = heads_for(n)
    for queries, keys in ((some, some), (4, 4), (4, 2), (4, 1)):
        for drops in (False, True):
            problem = Problem(LENGTH, queries, keys, drops=drops, **MASKS[mask])
            sequence = sequence_of(problem, method, grid, asked)
            if sequence is not None:
                compare(problem, sequence)
            else:
                assert queries != some and method == "ulysses" and n in (3, 8)


@every
def test_sequences_longer_than_tiles(grid, method, n, asked):
    documents, some = ((480,), (100, 251, 129)), heads_for(n)
    problem = Problem(480, some, some, window=200, documents=documents)
    compare(problem, sequence_of(problem, method, grid, asked))


@every
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_token_that_sees_itself_only_gets_its_value_exactly(
    grid, method, n, asked, precision
):
    """A10: the first token of the sequence and of each document; no NaN anywhere."""
    some = heads_for(n)
    for keys in (some, 1):
        shared = {"precision": precision, "documents": DOCUMENTS}
        problem = Problem(LENGTH, some, keys, **shared)
        sequence = sequence_of(problem, method, grid, asked)
        mine, own = attend(problem, sequence.core, sequence.own), sequence.own
        values = np.repeat(problem.arrays()[2], some // keys, axis=2)[:, own]
        first = problem.firsts[:, own] == own
        assert np.array_equal(mine.o[first], values[first])
        assert not mine.grads[0][first].any()
        for x in (mine.o, *mine.grads):
            assert np.isfinite(x).all()


@every
def test_a_window_of_one_passes_values_on_and_sends_no_key(grid, method, n, asked):
    """A10, A12: nothing is learned about queries and keys."""
    some = heads_for(n)
    problem = Problem(LENGTH, some, some, window=1)
    sequence = sequence_of(problem, method, grid, asked)
    before = grid.counters.snapshot()
    mine, (_, _, v, do) = attend(problem, sequence.core, sequence.own), problem.arrays()
    own, (dq, dk, dv) = sequence.own, mine.grads
    assert np.array_equal(mine.o, v[:, own]) and not dq.any() and not dk.any()
    assert_close(dv, do[:, own], 1e-12)
    moved = grid.counters.since(before).values()
    assert not any("send" in table for table in moved)


@every
@pytest.mark.parametrize("context, batch", [(1, 1), (1, 3), (7, 3), (13, 1)])
def test_what_is_added_behind_odd_sequences_changes_nothing(
    grid, method, n, asked, context, batch
):
    """A12"""
    some = heads_for(n)
    problem = Problem(context, some, some, batch=batch)
    sequence = sequence_of(problem, method, grid, asked)
    own, length = sequence.own, sequence.length
    # The same numbers, others behind them, whose outputs nothing depends on
    longer = dataclasses.replace(problem, length=length, real=context)
    whole, mine = alone(problem), attend(longer, sequence.core, own)
    is_real = own < context
    places = own[is_real]
    scale = max(np.abs(y).max() for y in whole.grads)
    for x, y in zip((mine.o, *mine.grads), (whole.o, *whole.grads), strict=True):
        error = np.abs(x[:, is_real] - y[:, places]).max(initial=0.0)
        assert error <= 1e-12 * scale
    assert not any(x[:, ~is_real].any() for x in mine.grads)
    if context == 1:
        assert np.array_equal(mine.o[:, is_real], problem.arrays()[2][:, places])
        assert not mine.grads[0].any() and not mine.grads[1].any()


@every
def test_micro_batches_may_be_in_flight_together(grid, method, n, asked):
    """Forward of one, another from end to end, backward of the first."""
    some = heads_for(n)
    problem = Problem(LENGTH, some, some, documents=DOCUMENTS)
    sequence = sequence_of(problem, method, grid, asked)
    other = Problem(LENGTH, some, some, window=30)
    mine = attend(
        problem, sequence.core, sequence.own, lambda: compare(other, sequence)
    )
    plain = attend(problem, sequence.core, sequence.own)
    for x, y in zip((mine.o, *mine.grads), (plain.o, *plain.grads), strict=True):
        assert np.array_equal(x, y)


# --- what is sent, saved and held -----------------------------------------------------


def exchanging(method, n, asked):
    """Neighbours that exchange heads, of which there are enough for all."""
    return {"ulysses": n, "usp": asked or n}.get(method, 1)


def hops_of(method, ranks, block, window):
    """Blocks of a ring that some rank needs."""
    if not window or (window > 1 and method in ("zigzag", "usp")):
        return ranks
    if method == "striped":
        return min(ranks, window)
    return min(ranks, 1 + -(-(window - 1) // block))


def stated(method, n, asked, problem):
    """{(axis, operation): (calls, bytes)} of a rank, forward and backward, by formula,
    and the bytes that it saves."""
    ops, b, q, g = problem.ops(), problem.batch, problem.queries, problem.keys
    item, half = ops.dtype.itemsize, ops.operand_dtype.itemsize
    s, u = problem.length // n, exchanging(method, n, asked)
    forward, backward, saved, h = {}, {}, b * s * q * item, problem.width
    if u > 1:
        key = ("cp" if u == n else f"cp/{u}"), "all_to_all"
        fused, o = b * s * h * (q + 2 * max(g, u)) * item, b * s * h * q * half
        saved += fused + o
        forward[key] = 2, (u - 1) * (fused + o) // u
        backward[key] = 2, (u - 1) * (fused + b * s * h * q * item) // u
    axis, m = ("cp" if u == 1 else f"cp:{u}"), n // u
    hop = 2 * b * (s * u) * max(1, g // u) * h * item
    hops = hops_of(method, m, s * u, problem.window)
    if method == "allgather":
        forward[axis, "all_gather"] = backward[axis, "all_gather"] = 1, (m - 1) * hop
        backward[axis, "reduce_scatter"] = 1, (m - 1) * hop
    elif hops > 1:
        forward[axis, "send"] = hops - 1, (hops - 1) * hop
        backward[axis, "send"] = 2 * hops - 1, (2 * hops - 1) * hop
    return forward, backward, saved


def counted(grid, before):
    """What was sent since, as `stated` has it."""
    return {
        (axis, op): (line["calls"], line["bytes"])
        for axis, table in grid.counters.since(before).items()
        for op, line in table.items()
        if op != "recv"
    }


@every
@pytest.mark.parametrize("precision", ["fp64", "fp16"])
def test_a_core_sends_and_saves_what_it_states(grid, method, n, asked, precision):
    some = heads_for(n)
    for keys, window in (
        (some, 0),
        (some // 2, 0),
        (1, 0),
        (some, 2),
        (1, 40),
        (1, 70),
    ):
        problem = Problem(LENGTH, some, keys, window=window, precision=precision)
        sequence = sequence_of(problem, method, grid, asked)
        begin, between = grid.counters.snapshot(), []

        def halfway(begin=begin, between=between):
            between += [counted(grid, begin), grid.counters.snapshot()]

        mine = attend(problem, sequence.core, sequence.own, halfway)
        forward, backward, saved = stated(method, n, asked, problem)
        assert between[0] == forward and counted(grid, between[1]) == backward
        cost = sequence.core.cost(2, LENGTH // n, problem.heads)
        costs = {key: (cost.calls[key], cost.moved[key]) for key in cost.calls}
        assert costs == counted(grid, begin)
        assert mine.held == cost.saved == saved
        seen = sum(min(i + 1, window or LENGTH) for i in range(LENGTH))
        one_pair = 2 * 2 * 2 * some * problem.width
        assert one_pair * seen / n - one_pair < cost.flops <= one_pair * seen / n


@pytest.mark.mpi(4)
def test_buffers_do_not_grow_with_the_ranks_of_a_ring(comm):
    """Four ranks and two, with as many positions on each."""
    block, peaks = 64, {}
    for n in (2, 4):
        with Grid(comm, {"cp": n, "dp": 4 // n}) as grid:
            for method in ("ring", "zigzag", "striped", "allgather"):
                problem = Problem(n * block, 4, 4, width=64, batch=1)
                peaks[method, n] = peak_of(problem, sequence_of(problem, method, grid))
    keys_and_values = 2 * block * 4 * 64 * 8
    for method in ("ring", "zigzag", "striped"):
        # Five buffers in the backward pass, the output, half as large, and some numbers
        # for each position
        assert 5.5 * keys_and_values < peaks[method, 2] < 5.7 * keys_and_values
        assert peaks[method, 4] < 1.01 * peaks[method, 2]
    assert peaks["allgather", 4] > 1.5 * peaks["allgather", 2]


def peak_of(problem, sequence):
    """Bytes allocated at most while a core runs, beyond its inputs and gradients."""
    q, k, v, do = (x[:, sequence.own].copy() for x in problem.arrays())
    grads = [np.zeros_like(x) for x in (q, k, v)]
    for _ in range(2):  # the first time makes buffers that stay
        shared = problem.step(sequence.own), problem.heads, problem.dropout()
        tracemalloc.start()
        o, saved = sequence.core.forward(q, k, v, *shared)
        sequence.core.backward(do, (q, k, v), o, saved, *shared, grads)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("method, n, asked", every_cut(2, 4))
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 16, 1 << 22])
def test_messages_of_any_size_need_no_buffers(
    grid, method, n, asked, nbytes, monkeypatch
):
    """A23"""
    monkeypatch.setattr(Communicator, "synchronous", True)
    # Keys and values of a block: 2 · 8 positions · 4 heads of `width` numbers
    problem = Problem(8 * n, width=nbytes // (2 * 8 * 4 * 8), batch=1)
    compare(problem, sequence_of(problem, method, grid, asked))


# --- layers ---------------------------------------------------------------------------

SERIAL = NullCommunicator("tp")
PACKED = {"is_packed": True}
LAYERS = {
    "attention": (attention, {"kv_heads": 2, "rope": True, "dropout": RATE}, {}),
    "in documents": (attention, {"kv_heads": 1, "window": 7, "rope": True}, PACKED),
    "gpt": (model, {"family": "gpt", "is_tied": True, "rate": RATE}, PACKED),
    "llama": (model, {"family": "llama", "is_tied": False, "window": 9}, PACKED),
}


@pytest.mark.parametrize("method, n, asked", every_cut(2, 4))
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_over_a_cut_sequence_is_the_serial_layer(grid, method, n, asked, layer):
    """A09: angles, places, labels and masks are those of the whole sequence."""
    problem, (build, options, more) = Problem(CONTEXT), LAYERS[layer]
    sequence = sequence_of(problem, method, grid, asked)
    ids = {"enters": "ids", "leaves": "loss"} if build is model else {}
    plain = Case(layer, build(**options), **ids, **more)
    serial = Made(plain, SERIAL, CONTEXT)
    cut = Made(
        Case(layer, build(**options, core=sequence.core), **ids), SERIAL, CONTEXT
    )
    own, step, x = sequence.own, serial.step, serial.x()
    places = None if step.places is None else step.places[:, own]
    cut.step = dataclasses.replace(
        step, positions=own, labels=step.labels[:, own], places=places, kept={}
    )
    y, saved = serial.layer.forward(x, serial.step)
    dy = upstream(y)
    dx = serial.layer.backward(dy, saved)
    before = grid.counters.snapshot()
    part, saved = cut.layer.forward(x[:, own].copy(), cut.step)
    cost = cut.layer.cost(BATCH, CONTEXT // n)
    assert nbytes_of(saved) == cost.saved
    part_dx = cut.layer.backward(dy if dy is None else dy[:, own].copy(), saved)
    costs = {key: (cost.calls[key], cost.moved[key]) for key in cost.calls}
    assert costs == counted(grid, before)
    if dy is None:
        assert grid.cp.all_reduce(np.array([part])) == pytest.approx(y, rel=1e-12)
    else:
        assert_close(part, y[:, own], 1e-12, "y")
        assert_close(part_dx, dx[:, own], 1e-12, "dx")
    assert_close(grid.cp.all_reduce(cut.flat.grad), serial.flat.grad, 1e-12, "gradient")
