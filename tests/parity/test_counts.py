"""Bytes and messages of a step, per axis, exactly; memory and saved activations too.

T tokens and N bytes are those of one micro-batch; t ranks on tp, n on dp, r copies of a
key/value head, m micro-batches, L layers.
"""

from typing import Any

import pytest
from parity.build import layout_engine, make_batch, make_recipe, take_step

from mpipar.config import Recipe
from mpipar.engine import Engine
from mpipar.train.metrics import memory

LAYERS, WIDTH, CONTEXT, BATCH = 2, 32, 16, 24
Sent = dict[tuple[str, str], tuple[int, int]]


def count_step(recipe: Recipe, comm: Any) -> tuple[Sent, Engine]:
    """(calls, bytes) of each (axis, operation) in one step, and the engine."""
    with layout_engine(recipe, comm) as engine:
        before = engine.grid.counters.snapshot()
        take_step(engine, make_batch(recipe, 0))
        table = engine.grid.counters.since(before)
    return {
        (axis, op): (tally["calls"], tally["bytes"])
        for axis, ops in table.items()
        for op, tally in ops.items()
    }, engine


def ring(n: int, items: int, itemsize: int) -> int:
    """Bytes per rank of an all-reduce: 2 (n−1)/n of the array, which n must divide."""
    assert items % n == 0
    return 2 * (n - 1) * items // n * itemsize


def total(*parts: tuple[int, int]) -> tuple[int, int]:
    calls, sent = zip(*parts, strict=True)
    return sum(calls), sum(sent)


def replicated(engine: Engine, axis: str) -> int:
    """Items whose gradient is a summand over this axis, by the layers' own shapes."""
    return sum(p.size for p in engine.flat.parameters if p.partial == axis)


def layout(tp: int, dp: int, micro: int, sequence: bool, *more: str) -> list[str]:
    words = [f"parallel.tensor={tp}", f"train.micro_batch={BATCH // dp // micro}"]
    return [*words, f"parallel.sequence={str(sequence).lower()}", *more]


def loss_messages(tp: int, dp: int, micro: int, item: int) -> tuple[int, int]:
    """A maximum of T items and a sum of 2 T items for each micro-batch."""
    tokens = BATCH // dp // micro * CONTEXT
    each = ring(tp, tokens, item) + ring(tp, 2 * tokens, item)
    return 2 * micro, micro * each


SHAPES = [
    pytest.param(tp, m, marks=pytest.mark.mpi(tp)) for tp in (2, 4) for m in (1, 2, 3)
]


@pytest.mark.parametrize(("tp", "m"), SHAPES)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_tensor_parallel_messages(comm, tp, m, family):
    recipe = make_recipe(tp, *layout(tp, 1, m, False, f"model.family={family}"))
    sent, _ = count_step(recipe, comm)
    big = ring(tp, BATCH // m * CONTEXT * WIDTH, 8)
    expected = m * (4 * LAYERS + 2), m * (4 * LAYERS + 2) * big
    assert sent.pop(("tp", "all_reduce")) == total(expected, loss_messages(tp, 1, m, 8))
    assert set(sent) == {("world", "all_reduce")}


@pytest.mark.parametrize(("tp", "m"), SHAPES)
@pytest.mark.parametrize(
    ("family", "items"),
    [
        # norm gains and biases, out.bias, down.bias; final norm; positions
        ("gpt", LAYERS * 6 * WIDTH + 2 * WIDTH + CONTEXT * WIDTH),
        ("llama", LAYERS * 2 * WIDTH + WIDTH),
    ],
)
def test_sequence_parallel_messages(comm, tp, m, family, items):
    recipe = make_recipe(tp, *layout(tp, 1, m, True, f"model.family={family}"))
    sent, engine = count_step(recipe, comm)
    half = ring(tp, BATCH // m * CONTEXT * WIDTH, 8) // 2
    gathers, scatters = m * (6 * LAYERS + 3), m * (4 * LAYERS + 2)
    assert sent.pop(("tp", "all_gather")) == (gathers, gathers * half)
    assert sent.pop(("tp", "reduce_scatter")) == (scatters, scatters * half)
    assert replicated(engine, "tp") == items
    sums = total((1, ring(tp, items, 8)), loss_messages(tp, 1, m, 8))
    assert sent.pop(("tp", "all_reduce")) == sums
    assert set(sent) == {("world", "all_reduce")}


@pytest.mark.parametrize(
    ("tp", "kv", "m"),
    [
        pytest.param(tp, kv, m, marks=pytest.mark.mpi(tp))
        for tp, kv in ((2, 1), (4, 1), (4, 2))
        for m in (1, 3)
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_copies_of_a_head_are_summed_by_one_message(comm, tp, kv, m, sequence):
    words = layout(tp, 1, m, sequence, f"model.kv_heads={kv}")
    sent, engine = count_step(make_recipe(tp, *words), comm)
    # K and V of one head, 8 rows each, with their biases
    items = LAYERS * 2 * (8 * WIDTH + 8)
    copies = tp // kv
    assert replicated(engine, "kv") == items
    assert sent[(f"tp/{copies}", "all_reduce")] == (1, ring(copies, items, 8))


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize(
    ("tp", "dp"),
    [
        pytest.param(tp, dp, marks=pytest.mark.mpi(tp * dp))
        for tp, dp in ((1, 2), (1, 4), (2, 2), (2, 4), (4, 2))
    ],
)
def test_data_parallel_messages(comm, tp, dp, m):
    """One bucket of 25 MiB holds all; only the last micro-batch sends it."""
    sent, engine = count_step(make_recipe(tp * dp, *layout(tp, dp, m, False)), comm)
    assert sent.pop(("grad", "all_reduce")) == (1, ring(dp, engine.flat.size, 8))
    calls, nbytes = sent.pop(("world", "all_reduce"))
    assert calls == 1
    assert nbytes <= 2 * 8 * 8
    assert {axis for axis, _ in sent} == ({"tp"} if tp > 1 else set())


@pytest.mark.parametrize("bucket", [1e-6, 0.02, 0.06, 0.1, 1.0])
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.mpi(2)
def test_buckets_follow_their_size(comm, bucket, tied):
    words = [f"parallel.bucket_mb={bucket}", "model.layers=3", f"model.tied={tied}"]
    sent, engine = count_step(make_recipe(2, *words), comm)
    sizes = [sum(p.size for p in unit) for unit in engine.model.groups().parameters]
    # From the last unit to the first, a bucket closes once it is large enough.
    buckets, held = 0, 0
    for size in reversed(sizes):
        held += size
        if held * 8 >= bucket * 2**20:
            buckets, held = buckets + 1, 0
    buckets += held > 0
    assert sent["grad", "all_reduce"] == (buckets, ring(2, sum(sizes), 8))
    if bucket == 1e-6:
        assert buckets == len(sizes) == 5
    if bucket == 1.0:
        assert buckets == 1


PRICED = [
    pytest.param(tp, dp, sequence, marks=pytest.mark.mpi(tp * dp))
    for tp, dp in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2))
    for sequence in ((False, True) if tp > 1 else (False,))
]


@pytest.mark.parametrize(("tp", "dp", "sequence"), PRICED)
@pytest.mark.parametrize(
    ("family", "precision", "item"), [("gpt", "fp32", 4), ("llama", "fp64", 8)]
)
def test_the_price_of_the_model_is_what_is_paid(
    comm, tp, dp, sequence, family, precision, item
):
    m = 2
    more = [f"model.family={family}", f"train.precision={precision}"]
    more += ["model.kv_heads=2", "model.dropout=0.1"]
    words = layout(tp, dp, m, sequence, *more)
    sent, engine = count_step(make_recipe(tp * dp, *words), comm)
    cost = engine.model.cost(BATCH // dp // m, CONTEXT)
    if sequence:
        items = replicated(engine, "tp")
        calls, nbytes = sent["tp", "all_reduce"]
        sent["tp", "all_reduce"] = calls - 1, nbytes - ring(tp, items, item)
    paid = {key: value for key, value in sent.items() if key[0] == "tp"}
    assert {k: (m * n, m * cost.moved[k]) for k, n in cost.calls.items()} == paid
    assert engine.executor.peak_bytes == cost.saved


@pytest.mark.parametrize(("tp", "dp", "sequence"), PRICED)
def test_memory_is_what_the_formulas_say(comm, tp, dp, sequence):
    words = layout(tp, dp, 1, sequence, "train.precision=fp32")
    _, engine = count_step(make_recipe(tp * dp, *words), comm)
    d, f, rank = WIDTH, 64, engine.grid.tp.rank
    # Whole on every rank: positions, norms, out.bias and down.bias
    whole = CONTEXT * d + 2 * d + LAYERS * 6 * d
    rows = 101 // tp + (rank < 101 % tp)
    cut = LAYERS * (4 * d * d + 3 * d + 2 * d * f + f) // tp
    items = whole + rows * d + cut
    found = memory(engine)
    assert found.pop("rss_peak") > 1 << 20
    assert found == {
        "params": 4 * items,
        "grads": 4 * items,
        "optimizer": 2 * 4 * items,
        "masters": 0,
        "unit_buffers": 0,
        "activations_peak": engine.executor.peak_bytes,
    }


@pytest.mark.mpi(2)
def test_evaluation_sends_the_forward_messages_only(comm):
    recipe = make_recipe(2, *layout(2, 1, 1, False))
    with layout_engine(recipe, comm) as engine:
        before = engine.grid.counters.snapshot()
        engine.evaluate([make_batch(recipe, 0)], 1)
        table = engine.grid.counters.since(before)
    assert table["tp"]["all_reduce"]["calls"] == 2 * LAYERS + 1 + 2
    assert table["world"]["all_reduce"]["calls"] == 1
