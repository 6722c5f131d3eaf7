"""ZeRO stages: the serial weights, bytes and messages by formula, peaks.

N data ranks in groups of S; a micro-batches; B = 1 + prefetch buffers for L blocks.
"""

import pytest
from parity.build import (
    compare,
    count_valid,
    layout_engine,
    make_batch,
    make_recipe,
    own_batches,
    take_step,
)
from parity.test_counts import count_step, ring

from mpipar.train.metrics import memory

STEPS = 5


def words(stage: int, *more: str) -> list[str]:
    return [f"parallel.zero={stage}", *more]


def cases():
    """(ranks, recipe changes) over all that meets state sharding."""
    for n in (2, 3, 4, 8):
        few = n in (2, 3)
        for extra in (
            [],
            ["model.tied=false", "train.micro_batch=1"],
            ["model.width=30", "model.heads=2", "model.ffn=50"],
            ["parallel.unit=2", "model.layers=5", "train.micro_batch=1"],
            ["parallel.prefetch=0", "model.layers=3", "train.global_batch=48"],
            ["parallel.prefetch=3", "model.layers=5", "model.dropout=0.1"],
            ["model.family=llama", "model.kv_heads=2", "parallel.prefetch=9"],
        ):
            yield pytest.param(extra, marks=[pytest.mark.mpi(n), *full(not few)])
    for n in (4, 8):
        for extra in (
            ["parallel.zero_shard=2", "train.micro_batch=1"],
            ["parallel.tensor=2", "parallel.sequence=true", "train.micro_batch=2"],
            ["parallel.tensor=2", "model.family=llama", "model.kv_heads=1"],
        ):
            yield pytest.param(extra, marks=[pytest.mark.mpi(n), *full(n == 8)])
    extra = ["parallel.tensor=2", "parallel.zero_shard=2", "model.tied=false"]
    yield pytest.param(extra, marks=[pytest.mark.mpi(8), pytest.mark.full])


def full(wide: bool) -> list:
    return [pytest.mark.full] if wide else []


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("extra", list(cases()))
def test_stages_give_the_serial_weights(comm, stage, extra):
    """A20"""
    errors = compare(make_recipe(comm.size, *words(stage, *extra)), comm, steps=STEPS)
    assert errors.above(1e-10) == {}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.mpi(2)
def test_units_in_shared_memory(comm, stage):
    """Large enough for the shared way, and for several units in flight."""
    sizes = ["model.width=256", "model.ffn=512", "model.layers=5", "model.vocab=300"]
    recipe = make_recipe(2, *words(stage, *sizes, "train.micro_batch=3"))
    assert compare(recipe, comm, steps=2).above(1e-10) == {}


# Messages


def scatter_bytes(engine, n: int) -> int:
    """Bytes that a rank sends to reduce-scatter, or to gather, all of the state."""
    return (n - 1) * sum(unit.size for unit in engine.flat.units) // n * 8


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.mpi(n)) for n in (2, 4)]
)
def test_messages_of_stages_1_and_2(comm, n, stage, accumulation):
    micro = f"train.micro_batch={24 // n // accumulation}"
    sent, engine = count_step(make_recipe(n, *words(stage, micro)), comm)
    units, once = len(engine.flat.units), scatter_bytes(engine, n)
    times = 1 if stage == 1 else accumulation
    assert sent["grad", "reduce_scatter"] == (times * units, times * once)
    assert sent["grad", "all_gather"] == (units, once)
    assert set(sent) == {
        ("grad", "reduce_scatter"), ("grad", "all_gather"), ("world", "all_reduce"),
    }  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.mpi(2)
def test_messages_and_peak_of_stage_3(comm, accumulation, prefetch):
    layers, a = 4, accumulation
    recipe = make_recipe(
        2, f"model.layers={layers}", f"train.micro_batch={12 // a}",
        *words(3, f"parallel.prefetch={prefetch}"),
    )  # fmt: skip
    with layout_engine(recipe, comm) as engine:
        take_step(engine, make_batch(recipe, 0))
        before = engine.grid.counters.snapshot()
        take_step(engine, make_batch(recipe, 1))
        sent = engine.grid.counters.since(before)["grad"]
        sizes = [unit.size for unit in engine.flat.units]
        root, block = sizes[0] + sizes[-1], sizes[1]
        assert set(sizes[1:-1]) == {block}
        # The last B blocks of a pass are still there when the next one turns round.
        held = min(1 + prefetch, layers)
        gathers = layers + (2 * a - 1) * (layers - held)
        assert sent["all_gather"]["calls"] == 2 + gathers
        assert sent["all_gather"]["bytes"] == (root + gathers * block) // 2 * 8
        assert sent["reduce_scatter"]["calls"] == a * (2 + layers)
        assert sent["reduce_scatter"]["bytes"] == a * sum(sizes) // 2 * 8
        assert engine.state.values.peak == held * block
        assert engine.state.values.buffer_bytes == (root + held * block) * 8


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.mpi(4)
def test_messages_of_hybrid_sharding(comm, stage):
    """Inside of a group as with S ranks; once a step the own parts across groups."""
    recipe = make_recipe(4, *words(stage, "parallel.zero_shard=2"))
    sent, engine = count_step(recipe, comm)
    units = len(engine.flat.units)
    parts = [unit.size // 2 for unit in engine.flat.units]
    assert sent["grad/2", "reduce_scatter"] == (units, scatter_bytes(engine, 2))
    assert sent["grad:2", "all_reduce"] == (units, sum(ring(2, p, 8) for p in parts))
    assert not any(axis == "grad" for axis, _ in sent)


@pytest.mark.mpi(2)
def test_evaluation_gathers_and_leaves_no_gradient(comm):
    recipe = make_recipe(2, *words(3, "model.layers=3", "parallel.prefetch=0"))
    with layout_engine(recipe, comm) as engine:
        batch = make_batch(recipe, 0)
        take_step(engine, batch)
        before = engine.grid.counters.snapshot()
        for _ in range(2):
            engine.evaluate(own_batches(engine, batch), count_valid(batch))
        sent = engine.grid.counters.since(before)["grad"]
        # Root once; the one buffer holds the last block of the round before.
        assert sent["all_gather"]["calls"] == 2 + 2 * 3
        assert "reduce_scatter" not in sent


# Memory


# Bytes of a value, a summed gradient, a master and both moments.
BYTES = {"fp64": (8, 8, 0, 16), "fp32": (4, 4, 0, 8)} | dict.fromkeys(
    ("bf16", "fp16"), (2, 2, 4, 8)
)


@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("n", "shard"),
    [
        pytest.param(n, s, marks=pytest.mark.mpi(n))
        for n, s in ((2, 2), (3, 3), (4, 4), (4, 2))
    ],
)
def test_memory_is_what_the_formula_says(comm, n, shard, stage, precision):
    """For Ψ padded weights 16 Ψ, 8 Ψ + 8 Ψ/S, 4 Ψ + 12 Ψ/S, 16 Ψ/S bytes in fp32, and
    16 Ψ, 4 Ψ + 12 Ψ/S, 2 Ψ + 14 Ψ/S, 16 Ψ/S in mixed precision."""
    more = [f"train.precision={precision}", "model.layers=3"]
    more += [f"parallel.zero_shard={shard}"] if stage else []
    _, engine = count_step(make_recipe(n, *words(stage, *more)), comm)
    value, grad, master, moments = BYTES[precision]
    exact = [sum(p.size for p in unit.parameters) for unit in engine.flat.units]
    sizes = [unit.size for unit in engine.flat.units]
    padding = shard * 128 // value if stage else 1
    assert all(0 <= s - e < padding for s, e in zip(sizes, exact, strict=True))
    whole, part = sum(sizes), sum(sizes) // (shard if stage else 1)
    found = memory(engine)
    assert found["params"] == value * (part if stage == 3 else whole)
    assert found["grads"] == grad * (part if stage >= 2 else whole)
    assert found["masters"] == master * part
    assert found["optimizer"] == moments * part
    root, block = sizes[0] + sizes[-1], max(sizes[1:-1])
    buffers = {0: 0, 1: 0, 2: 2 * block + root}
    buffers[3] = buffers[2] + 2 * block + root
    assert found["unit_buffers"] == value * buffers[stage]
    del found["rss_peak"]
    assert found == engine.predicted_memory()
    if precision != "fp64":
        state = sum(found[k] for k in ("params", "grads", "masters", "optimizer"))
        table = (
            {1: (8, 8), 2: (4, 12)} if precision == "fp32" else {1: (4, 12), 2: (2, 14)}
        )
        held, shared = {0: (16, 0), 3: (0, 16)}.get(stage) or table[stage]
        assert state == held * whole + shared * part


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "extra",
    [
        ["parallel.unit=2", "model.layers=5", "train.micro_batch=3"],
        ["train.recompute=full", "parallel.unit=3", "model.layers=5"],
        ["train.recompute=selective", "parallel.prefetch=0", "model.family=llama"],
        ["model.layers=1", "model.tied=false", "train.recompute=full"],
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.mpi(2)
def test_predicted_memory_is_what_is_held(comm, stage, extra, precision):
    more = [*extra, f"train.precision={precision}"]
    _, engine = count_step(make_recipe(2, *words(stage, *more)), comm)
    found = memory(engine)
    del found["rss_peak"]
    assert found == engine.predicted_memory()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.mpi(8)
def test_parts_may_be_nothing_but_padding(comm, stage):
    """Final norm: 8 elements over 8 ranks, so that most parts are empty."""
    tiny = ["model.width=8", "model.heads=2", "model.ffn=8", "model.layers=1"]
    errors = compare(make_recipe(8, *words(stage, *tiny)), comm)
    assert errors.above(1e-10) == {}
