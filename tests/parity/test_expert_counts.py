"""Rows, bytes and messages between experts, memory, and loads, exactly.

n ranks on ep; t tokens of a rank in a micro-batch, of which each takes k of e experts;
m micro-batches, L layers with experts.
"""

import numpy as np
import pytest
from parity.build import (
    layout_engine,
    make_batch,
    make_recipe,
    own_batches,
    serial_engine,
    take_step,
)
from parity.test_counts import count_step, ring
from parity.test_experts import (
    APART,
    CP2,
    CUT,
    EP2,
    LOSSES,
    MODEL,
    PP2,
    SIGMOIDS,
    TP2,
    on_ranks,
)

from mpipar.layers.expert import Router, mixture
from mpipar.train.metrics import memory

WIDTH, EXPERTS, LAYERS = 32, 8, 2
OVERLAP, DROPS = "parallel.expert_overlap=true", "experts.capacity=0.75"
FOUR = "parallel.expert=4"


def recipe_of(comm, words, *more):
    return make_recipe(comm.size, *MODEL.split(), *words.split(), *more)


@pytest.fixture
def routed(monkeypatch):
    """Chosen experts of all choices that are taken, for each plan of this rank."""
    found, whole = [], mixture.make_plan

    def plan(chosen, kept, *rest):
        found.append(chosen[kept] if kept is not None else chosen.reshape(-1))
        return whole(chosen, kept, *rest)

    monkeypatch.setattr(mixture, "make_plan", plan)
    return found


def rows_between(comm, ep, routed):
    """Rows that this rank sends to others of ep, and those that come, in all plans."""
    own = np.bincount(np.concatenate(routed), minlength=EXPERTS)
    to_rank = own.reshape(ep.size, -1).sum(axis=1)
    members = comm.allgather((tuple(ep.members), ep.rank, to_rank))
    here = [(rank, rows) for group, rank, rows in members if group == tuple(ep.members)]
    came = {rank: rows[ep.rank] for rank, rows in here}
    return to_rank.sum() - to_rank[ep.rank], sum(came.values()) - came[ep.rank]


@on_ranks(
    [
        (2, EP2),
        (2, f"{EP2} {OVERLAP} {DROPS}"),
        (2, f"{EP2} {SIGMOIDS} {DROPS} train.micro_batch=4 train.precision=fp32"),
        (2, f"{EP2} {SIGMOIDS} train.micro_batch=4 train.precision=bf16"),
        (2, f"{EP2} {TP2} {APART} {LOSSES}"),
        (2, f"{EP2} {CP2} model.context=13 {LOSSES}"),
        (4, f"{FOUR} experts.shared=1 parallel.zero=3 {OVERLAP}"),
        (4, f"{EP2} {TP2}"),
        (4, f"{FOUR} {TP2} {CUT} {APART} {DROPS} {LOSSES}"),
        (4, f"{EP2} {PP2} parallel.schedule=zb-h1 train.micro_batch=2"),
    ]
)
def test_rows_travel_to_where_their_experts_are(comm, routed, words):
    recipe = recipe_of(comm, words)
    sent, engine = count_step(recipe, comm)
    ep, m = engine.grid.ep, recipe.accumulation
    layers, parts = LAYERS // engine.grid.pp.size, 1 + (OVERLAP in words)
    out, back = rows_between(comm, ep, routed)
    operand, item = engine.ops.operand_dtype.itemsize, engine.ops.dtype.itemsize
    plans = layers * m * parts
    assert len(routed) == plans
    # Tokens and their gradients leave in the operand type; results in the other one
    nbytes = 2 * out * WIDTH * operand + 2 * back * WIDTH * item
    nbytes += plans * 8 * EXPERTS * (ep.size - 1) // ep.size
    assert sent["ep", "all_to_all"] == (5 * plans, nbytes)
    assert {op for axis, op in sent if axis == "ep"} == {"all_to_all"}
    cost = engine.model.cost(*engine.micro_shape)
    assert cost.calls["ep", "all_to_all"] * m == 5 * plans


@pytest.mark.mpi(2)
def test_even_loads_cost_what_the_formula_says(comm, monkeypatch):
    """Tokens take experts in turn."""

    def in_turn(scores, count, **_):
        return np.arange(scores.size // EXPERTS * count).reshape(-1, count) % EXPERTS

    monkeypatch.setattr("mpipar.layers.expert.router.choose", in_turn)
    for words in (EP2, f"{EP2} {OVERLAP}", f"{EP2} {TP2} {APART} {CUT}"):
        recipe = recipe_of(comm, words, "train.micro_batch=4")
        sent, engine = count_step(recipe, comm)
        cost, m = engine.model.cost(*engine.micro_shape), recipe.accumulation
        for key in (k for k in cost.calls if k[0] == "ep"):
            assert sent[key] == (m * cost.calls[key], m * cost.moved[key])
        found = memory(engine)
        assert found.pop("rss_peak") and found == engine.predicted_memory()


@pytest.mark.mpi(2)
def test_a_pass_that_is_done_again_sends_again_and_an_evaluation_once(comm):
    recipe = recipe_of(comm, EP2, "train.recompute=full")
    sent, _ = count_step(recipe, comm)
    m = recipe.accumulation
    assert sent["ep", "all_to_all"][0] == LAYERS * m * (5 + 3)
    with layout_engine(recipe, comm) as engine:
        before = engine.grid.counters.snapshot()
        batches = own_batches(engine, make_batch(recipe, 0))
        engine.evaluate(batches, 1)
        table = engine.grid.counters.since(before)
    assert table["ep"]["all_to_all"]["calls"] == LAYERS * m * 3


@on_ranks(
    [
        (2, f"{EP2} {CP2} {LOSSES}"),
        (2, f"{CP2} {DROPS} train.micro_batch=4"),
        (4, f"{CP2} {TP2} {DROPS} train.micro_batch=4"),
        (4, f"{CP2} {TP2} {APART} {DROPS} train.micro_batch=4"),
    ]
)
def test_what_counts_whole_sequences_is_gathered(comm, words):
    """Places of the own tokens, and the choices of each: 4·s·(b·k + 1) bytes, of as
    many ranks of tp as have tokens of their own."""
    recipe = recipe_of(comm, words, "parallel.context_method=ring")
    sent, engine = count_step(recipe, comm)
    b, s = engine.micro_shape
    each = 4 * s * (b * 2 + 1)
    times = LAYERS * recipe.accumulation
    assert sent["cp", "all_gather"] == (times, times * each)
    cost = engine.model.cost(*engine.micro_shape)
    assert cost.moved["cp", "all_gather"] == LAYERS * each


@on_ranks(
    [
        (2, f"{TP2} {APART} {EP2}"),
        (2, f"{TP2} {APART} {EP2} {CUT} train.recompute=selective"),
        (2, f"{TP2} experts.shared=1"),
        (2, f"{TP2} {CUT} experts.shared=1 {SIGMOIDS}"),
        (2, f"{TP2} {CUT} {APART} experts.shared=1 {LOSSES}"),
    ]
)
def test_tensor_ranks_pay_what_the_model_says(comm, words):
    recipe = recipe_of(comm, words, "model.family=llama", "train.micro_batch=4")
    sent, engine = count_step(recipe, comm)
    cost, m = engine.model.cost(*engine.micro_shape), recipe.accumulation
    priced = {k: (m * n, m * cost.moved[k]) for k, n in cost.calls.items()}
    items = sum(p.size for p in engine.state.parameters if p.partial == "tp")
    calls, nbytes = priced["tp", "all_reduce"]
    # Gradients that are summands are summed once
    priced["tp", "all_reduce"] = calls + 1, nbytes + ring(2, items, 8)
    on_tp = {key: value for key, value in sent.items() if key[0] == "tp"}
    assert on_tp == {k: x for k, x in priced.items() if k[0] == "tp"}


# Memory


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.mpi(4)
def test_a_rank_holds_its_share_of_the_experts(comm, zero):
    held = {}
    for ep in (1, 2, 4):
        words = f"parallel.expert={ep} parallel.zero={zero} {SIGMOIDS}"
        recipe = recipe_of(comm, words, "train.micro_batch=2")
        with layout_engine(recipe, comm) as engine:
            take_step(engine, make_batch(recipe, 0))
            held[ep] = memory(engine)
            predicted = engine.predicted_memory()
        for kind in predicted.keys() - {"activations_peak"}:
            assert held[ep][kind] == predicted[kind], kind
    experts = 8 * LAYERS * EXPERTS * 2 * 16 * WIDTH
    for kind, stage, copies in (("params", 3, 1), ("grads", 2, 1), ("optimizer", 1, 2)):
        for ep in (2, 4):
            saved = 0 if zero >= stage else experts - experts // ep
            assert held[1][kind] - held[ep][kind] == copies * saved, kind


# Loads


@on_ranks(
    [
        (2, f"{EP2} {DROPS}"),
        (2, f"{EP2} {TP2} {APART} {DROPS} {OVERLAP} train.recompute=full"),
        (2, f"{EP2} {CP2} model.context=13 {DROPS}"),
        (2, f"{PP2} parallel.schedule=zb-h1 train.micro_batch=4 {DROPS}"),
        (4, f"{EP2} {TP2} {CUT} {SIGMOIDS} experts.dense_blocks=1"),
        (4, f"{FOUR} {CP2} {DROPS} parallel.zero=3 model.context=13"),
    ]
)
def test_loads_are_those_of_one_rank(comm, words):
    recipe = recipe_of(comm, words)
    alone, batch = serial_engine(recipe), make_batch(recipe, 0)
    expected = take_step(alone, batch).loads
    with layout_engine(recipe, comm) as engine:
        loads = take_step(engine, batch).loads
        assert engine.weights() == alone.weights()
    assert list(loads) == [
        f"blocks.{n}.mlp" for n in range(recipe.experts.dense_blocks, LAYERS)
    ]
    length, active = recipe.model.context, recipe.experts.active
    for name, counts in loads.items():
        assert np.array_equal(counts, expected[name])
        assert counts[:-1].sum() == 16 * length * active
        assert (counts[-1] > 0) == (DROPS in words)


@pytest.mark.mpi(2)
def test_what_is_dropped_is_counted(comm, routed):
    recipe = recipe_of(comm, f"{EP2} {DROPS} train.micro_batch=4")
    with layout_engine(recipe, comm) as engine:
        loads = take_step(engine, make_batch(recipe, 0)).loads
    taken = sum(comm.allgather(sum(map(len, routed))))
    dropped = sum(counts[-1] for counts in loads.values())
    assert dropped == LAYERS * 16 * 16 * 2 - taken > 0


@pytest.mark.mpi(2)
def test_training_without_a_break_reports_the_loads_of_each_batch(comm):
    words = f"{PP2} parallel.schedule=2bw train.micro_batch=4 {DROPS}"
    recipe = recipe_of(comm, words, "optimizer.lr=1e-30")
    alone, found = serial_engine(recipe), []
    with layout_engine(recipe, comm) as engine:
        for step in range(3):
            found.append(take_step(engine, make_batch(recipe, step)))
        found.append(engine.drain())
    for step, result in enumerate(found[1:]):
        expected = take_step(alone, make_batch(recipe, step)).loads
        assert list(result.loads) == list(expected)
        assert all(np.array_equal(result.loads[n], x) for n, x in expected.items())


def biases(engine):
    """Those of the routers on this rank, in full precision."""
    return {
        name.removesuffix(".router.bias"): piece.data[lo:hi].copy()
        for piece in engine.state.pieces()
        for name, lo, hi in piece.unit.runs(lambda p: p.name, piece.begin, piece.end)
        if name.endswith("router.bias")
    }


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@on_ranks(
    [
        (2, "model.context=23 train.micro_batch=8"),
        (2, f"{EP2} train.micro_batch=1"),
        (2, f"{TP2} {APART} {EP2} train.micro_batch=4"),
        (4, f"{EP2} {TP2} {CUT} train.micro_batch=1"),
    ]
)
def test_biases_follow_the_loads_of_all_ranks_exactly(comm, words, precision):
    """However small the difference from the mean is."""
    recipe = recipe_of(comm, f"{SIGMOIDS} {words}", f"train.precision={precision}")
    with layout_engine(recipe, comm) as engine:
        for step in range(4):
            before = biases(engine)
            result = take_step(engine, make_batch(recipe, step))
            assert result.updated
            for name, after in biases(engine).items():
                loads = result.loads[name][:-1]
                moved = before[name] - after.dtype.type(0.01) * np.sign(
                    loads - loads.mean()
                ).astype(after.dtype)
                assert np.array_equal(after, moved), (step, name, loads)


@pytest.mark.parametrize(
    ("precision", "micro"),
    [("fp32", 1), ("fp32", 8), ("bf16", 1), ("bf16", 8), ("fp16", 8)],
)
@pytest.mark.mpi(2)
def test_a_bias_feels_one_token_of_thousands(comm, monkeypatch, precision, micro):
    """What one rank has more of an expert than the mean, the other has less, but for
    one token."""
    far = np.array([517, -517, 333, -333, 0, 0, 0, 0])
    near = np.array([1, -1, -1, 1, 0, 0, 0, 0])
    loads = 2000 + (far if comm.rank == 0 else near - far)
    monkeypatch.setattr(Router, "loads", lambda *_: loads)
    recipe = recipe_of(
        comm, SIGMOIDS, f"train.precision={precision}", f"train.micro_batch={micro}"
    )
    with layout_engine(recipe, comm) as engine:
        before = biases(engine)
        result = take_step(engine, make_batch(recipe, 0))
        for name, after in biases(engine).items():
            counts = result.loads[name][:-1]
            assert np.array_equal(counts, recipe.accumulation * (4000 + near))
            assert np.sign(before[name] - after).tolist() == np.sign(near).tolist()
