"""Bytes, messages and memory of a sequence that several ranks share, exactly.

c ranks on cp, of which u exchange heads; b sequences of a micro-batch, s positions of
each on a rank, n query and g key/value heads of width h; m micro-batches, L layers.
"""

import pytest
from parity.build import layout_engine, make_batch, make_recipe
from parity.test_counts import count_step, total

from mpipar.config.kinds import METHODS
from mpipar.train.metrics import memory

LAYERS, HEADS, WIDTH, BATCH, M = 2, 4, 32, 8, 2
H = WIDTH // HEADS
RINGS = ("ring", "zigzag", "striped")
SIZES = f"model.layers={LAYERS} model.width={WIDTH} model.heads={HEADS}"
SIZES += f" model.context=32 train.global_batch={BATCH} train.micro_batch={BATCH // M}"


def recipe_of(ranks, method, cp, *more):
    words = f"{SIZES} parallel.context={cp} parallel.context_method={method}".split()
    words += ["parallel.ulysses=2"] if method == "usp" and cp == 4 else []
    return make_recipe(ranks, *words, *more)


def on_ranks(*sizes):
    """Parameters (cp, more words, ranks)."""
    return pytest.mark.parametrize(
        ("cp", "words"),
        [
            pytest.param(cp, words, marks=pytest.mark.mpi(ranks), id=f"{cp} {words}")
            for ranks, cp, words in sizes
        ],
    )


def paid_on(sent, *axes):
    """What was sent on axes of these names; what was received has no bytes."""
    assert all(size == 0 for (_, op), (_, size) in sent.items() if op == "recv")
    return {
        (axis, op): value
        for (axis, op), value in sent.items()
        if axis.startswith(axes) and op != "recv"
    }


def of_ring(c, b, s, g, item, hops):
    """(calls, bytes) of a layer: keys and values to and fro, gradients once around."""
    calls = 3 * hops - 2 if hops > 1 else 0
    return calls, calls * 2 * b * s * g * H * item


def of_heads(u, b, s, n, g, item):
    """(calls, bytes) of a layer: q, k, v and o there and back, (u − 1)/u of each.

    g   key/value heads that are sent, a copy for each rank where there are fewer
    """
    sent = b * s * (2 * n + 2 * max(g, u)) * H * item
    return 4, 2 * sent * (u - 1) // u


def expected(method, cp, s, g, item, hops):
    """{(axis, operation): (calls, bytes)} of one layer and micro-batch."""
    b = BATCH // M
    if method in RINGS:
        return {("cp", "send"): of_ring(cp, b, s, g, item, hops)}
    if method == "allgather":
        each = (cp - 1) * b * 2 * s * g * H * item
        return {
            ("cp", "all_gather"): (2, 2 * each),
            ("cp", "reduce_scatter"): (1, each),
        }
    if method == "ulysses" or cp == 2:
        return {("cp", "all_to_all"): of_heads(cp, b, s, HEADS, g, item)}
    # Two that exchange heads, and a ring of two with twice the positions and half the
    # heads
    own = max(1, g // 2)
    return {
        ("cp/2", "all_to_all"): of_heads(2, b, s, HEADS, g, item),
        ("cp:2", "send"): of_ring(2, b, 2 * s, own, item, 2),
    }


@pytest.mark.parametrize("method", METHODS)
@on_ranks(
    (2, 2, "model.kv_heads=1 model.family=llama"),
    (4, 4, "model.kv_heads=4"),
    (4, 4, "model.kv_heads=2 train.precision=fp32"),
    (4, 4, "model.kv_heads=1"),
)
def test_the_messages_of_every_method(comm, cp, words, method):
    recipe = recipe_of(comm.size, method, cp, *words.split())
    sent, engine = count_step(recipe, comm)
    item = 4 if "fp32" in words else 8
    one = expected(method, cp, 32 // cp, recipe.model.kv_heads, item, cp)
    every = LAYERS * M
    paid = paid_on(sent, "cp")
    assert paid == {key: (every * n, every * size) for key, (n, size) in one.items()}
    cost = engine.model.cost(*engine.micro_shape)
    assert paid == {k: (M * n, M * cost.moved[k]) for k, n in cost.calls.items()}
    # Weights are copies on the axis: their gradients are summed over it, once.
    assert sent["grad", "all_reduce"][0] == 1


@pytest.mark.parametrize(
    ("method", "window", "hops"),
    # 8 positions on each of 4 ranks: in one part, in two of 4, or one in four
    [("ring", 1, 1), ("ring", 9, 2), ("ring", 10, 3), ("ring", 18, 4)]
    + [("zigzag", 1, 1), ("zigzag", 2, 4), ("striped", 1, 1)]
    + [("striped", 2, 2), ("striped", 3, 3), ("striped", 4, 4)],
)
@pytest.mark.mpi(4)
def test_a_window_saves_hops(comm, method, window, hops):
    """Of no rank a query sees a key that is further around the ring."""
    recipe = recipe_of(4, method, 4, f"model.window={window}")
    sent, engine = count_step(recipe, comm)
    each = of_ring(4, BATCH // M, 8, HEADS, 8, hops)
    assert total((0, 0), *paid_on(sent, "cp").values()) == tuple(
        LAYERS * M * x for x in each
    )
    cost = engine.model.cost(*engine.micro_shape)
    assert sum(cost.calls.values()) == LAYERS * each[0]


@pytest.mark.parametrize("method", METHODS)
@on_ranks((4, 4, "model.context=29"), (4, 2, "parallel.tensor=2"))
def test_evaluation_sends_the_forward_messages_only(comm, cp, words, method):
    recipe = recipe_of(4, method, cp, *words.split())
    with layout_engine(recipe, comm) as engine:
        before = engine.grid.counters.snapshot()
        engine.evaluate([make_batch(recipe, 0)], 1)
        table = engine.grid.counters.since(before)
    calls = {
        (axis, op): tally["calls"]
        for axis, ops in table.items()
        for op, tally in ops.items()
        if axis.startswith("cp") and op != "recv"
    }
    one = {"send": cp - 1, "all_gather": 1, "all_to_all": 2}
    if method == "usp" and cp == 4:
        assert calls == {("cp/2", "all_to_all"): 2 * LAYERS, ("cp:2", "send"): LAYERS}
    else:
        assert calls == {(a, op): LAYERS * one[op] for a, op in calls} != {}


# The model's own price, and memory

SPLITS = [
    (2, 2, "train.precision=fp32"),
    (4, 4, "model.family=llama model.kv_heads=1"),
    (4, 4, "model.dropout=0.1 train.recompute=full"),
    (4, 2, "parallel.tensor=2 model.kv_heads=2"),
    (4, 2, "parallel.tensor=2 parallel.sequence=true train.recompute=selective"),
    (4, 2, "parallel.pipeline=2 parallel.schedule=zb-h1 model.kv_heads=2"),
    (4, 2, "train.precision=bf16 parallel.zero=3"),
    (4, 4, "model.context=29 model.window=5 data.documents=separate data.end_token=3"),
]


@pytest.mark.parametrize("method", METHODS)
@on_ranks(*SPLITS)
def test_messages_and_memory_are_what_the_formulas_say(comm, cp, words, method):
    recipe = recipe_of(comm.size, method, cp, *words.split())
    sent, engine = count_step(recipe, comm)
    if "recompute=full" not in words:
        axes = ("cp",) if "sequence" in words else ("cp", "tp")
        cost, paid = engine.model.cost(*engine.micro_shape), paid_on(sent, *axes)
        m = recipe.accumulation
        priced = {k: (m * n, m * cost.moved[k]) for k, n in cost.calls.items()}
        assert paid == {k: x for k, x in priced.items() if k[0].startswith(axes)}
    found = memory(engine)
    assert found.pop("rss_peak") > 1 << 20
    assert found == engine.predicted_memory()
    assert found["activations_peak"] > 0


def peaks(comm, method, *words):
    """The activations' peak with 1, 2 and 4 ranks on cp; what is left shares the batch,
    of which a rank has as much at a time."""
    found = {}
    for cp in (1, 2, 4):
        recipe = recipe_of(4, method, cp, "train.micro_batch=2", *words)
        found[cp] = count_step(recipe, comm)[1].executor.peak_bytes
    return found


@pytest.mark.parametrize("words", ["model.family=llama", "train.recompute=full"])
@pytest.mark.parametrize("method", [*RINGS, "allgather"])
@pytest.mark.mpi(4)
def test_activations_fall_as_the_ranks_grow(comm, method, words):
    """Nothing at all is kept but what belongs to the own positions."""
    found = peaks(comm, method, "model.kv_heads=2", *words.split())
    assert found[2] * 2 == found[4] * 4 == found[1]


@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.mpi(4)
def test_exchanged_heads_keep_the_output_twice(comm, kv):
    """And a copy of a key/value head for each rank, where there are fewer."""
    found = peaks(comm, "ulysses", f"model.kv_heads={kv}")
    for cp in (2, 4):
        tokens, output = 2 * 32 // cp, HEADS * H
        copies = 2 * (max(kv, cp) - kv) * H
        beside = LAYERS * tokens * (output + copies) * 8
        assert (found[cp] - beside) * cp == found[1]
