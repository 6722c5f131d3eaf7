"""Pipelines: every schedule in every layout against the serial model; what is in flight
and what is sent, by formula.

p stages, m micro-batches, v chunks.
"""

from itertools import count

import numpy as np
import pytest
from parity.build import (
    compare,
    layout_engine,
    make_batch,
    make_recipe,
    own_batches,
    take_step,
)
from parity.test_counts import count_step

from mpipar.comm import Communicator
from mpipar.engine import stages
from mpipar.engine.stages import plan_schedule
from mpipar.errors import ConfigError
from mpipar.pipeline.simulate import messages, simulate
from mpipar.train.metrics import memory

# Chunks of each schedule
CHUNKS = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "1f1b-eager": 1, "interleaved": 2, "zb-h1": 1,
    "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2,
}  # fmt: skip
# (pp, tp, dp)
GRIDS = [
    (2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (3, 2, 1), (3, 1, 2),
    (4, 2, 1), (4, 1, 2), (2, 2, 2),
]  # fmt: skip
STANDARD = {(2, 1, 1): (1, 2, 5, 9), (4, 1, 1): (3, 8), (2, 1, 2): (2, 6)}


def cases():
    """(schedule, grid, micro-batches): of each grid some are of the standard tier, and
    of the others every second one, another with each schedule, of the full tier."""
    for grid in GRIDS:
        ranks, usual = int(np.prod(grid)), STANDARD.get(grid, ())
        every = (1, 2, 3, 5, 6, 8, 9) if ranks <= 4 else (1, 4, 8)
        others = [m for m in every if m not in usual]
        for place, schedule in enumerate(CHUNKS):
            wide, rest = others[place % 2 :: 2], others[1 - place % 2 :: 2]
            for tier, chosen in (("", usual), ("full", wide), ("exhaustive", rest)):
                marks = [pytest.mark.mpi(ranks, timeout=240)]
                marks += [getattr(pytest.mark, tier)] if tier else []
                if chosen:
                    name = f"{schedule} {'x'.join(map(str, grid))} {tier}".strip()
                    yield pytest.param(schedule, grid, chosen, marks=marks, id=name)


def words(schedule, grid, micro_batches, *more):
    """A recipe of two sequences a micro-batch and 2 p v + 1 blocks, or fewer."""
    p, tp, dp = grid
    return [
        f"parallel.pipeline={p}", f"parallel.tensor={tp}",
        f"parallel.schedule={schedule}", f"parallel.chunks={CHUNKS[schedule]}",
        f"train.global_batch={2 * dp * micro_batches}", "train.micro_batch=2",
        f"model.layers={p * CHUNKS[schedule] + 1}", *more,
    ]  # fmt: skip


def variety(grid, number):
    """What else a layout has, in turn."""
    _, tp, dp = grid
    family = "llama" if number % 3 == 2 else "gpt"
    chosen = [f"model.family={family}", f"parallel.zero={number % 4}"]
    chosen += ["model.tied=false"] if number % 2 else []
    chosen += ["parallel.sequence=true"] if tp > 1 and number % 4 < 2 else []
    chosen += [f"parallel.prefetch={number % 3}"] if dp > 1 else []
    modes = ("none", "none", "selective", "full")
    return [*chosen, f"train.recompute={modes[number // 2 % 4]}"]


@pytest.mark.parametrize(("schedule", "grid", "micro_batches"), list(cases()))
def test_every_schedule_gives_the_serial_weights(comm, schedule, grid, micro_batches):
    """A28: also with fewer micro-batches than stages, or a refusal."""
    for number, m in zip(count(list(CHUNKS).index(schedule)), micro_batches):
        changes = words(schedule, grid, m, *variety(grid, number))
        if schedule == "dualpipe-v" and m < 2 * grid[0]:
            with pytest.raises(ConfigError, match="needs at least"):
                make_recipe(comm.size, *changes)
            continue
        errors = compare(make_recipe(comm.size, *changes), comm, steps=2)
        assert errors.above(1e-10) == {}, changes


@pytest.mark.parametrize(
    ("layers", "partition"),
    [(10, "even"), (5, "even"), (2, "even"), (5, "0,5,0,0"), (3, "1,0,0,2")],
)
@pytest.mark.mpi(4)
def test_every_layer_is_on_one_stage(comm, layers, partition):
    """A29: also where the stages do not divide the layers, or have none."""
    recipe = make_recipe(
        4, "parallel.pipeline=4", f"model.layers={layers}", "train.micro_batch=6",
        f"parallel.partition={partition}",
    )  # fmt: skip
    with layout_engine(recipe, comm) as engine:
        held = comm.allgather(len(engine.model.blocks))
        assert sum(held) == layers
        if partition == "even":
            assert max(held) - min(held) <= 1
        else:
            assert held == [int(n) for n in partition.split(",")]
    assert compare(recipe, comm, steps=2).above(1e-10) == {}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    ("ranks", "extra"),
    [
        pytest.param(n, extra, marks=pytest.mark.mpi(n))
        for n, extra in (
            (2, "parallel.pipeline=2"),
            (4, "parallel.pipeline=4"),
            (4, "parallel.pipeline=2 parallel.tensor=2"),
            (4, "parallel.pipeline=2"),
        )
    ],
)
def test_both_copies_of_a_tied_weight_stay_equal(comm, ranks, extra, zero):
    """A04: to the bit, after every step."""
    recipe = make_recipe(
        ranks, *extra.split(), "train.micro_batch=3", f"parallel.zero={zero}"
    )
    with layout_engine(recipe, comm) as engine:
        for step in range(3):
            take_step(engine, make_batch(recipe, step))
            own = None
            for parameters in engine.state.whole_units("values"):
                for p in parameters:
                    if p.name == "embedding.token.weight":
                        own = engine.grid.tp.rank, p.data.tobytes(), p.owner
            held = [x for x in comm.allgather(own) if x is not None]
            tp = engine.grid.tp.size
            assert len(held) == 2 * comm.size // recipe.parallel.pipeline
            assert len({x[:2] for x in held}) == tp
            assert sum(x[2] for x in held) == len(held) // 2


@pytest.mark.mpi(4)
def test_the_norm_does_not_depend_on_the_stages(comm):
    """A06: gradients are those of the mean, not of a sum divided only to be shown."""
    norms, losses = [], []
    for p in (1, 2, 4):
        recipe = make_recipe(
            4, f"parallel.pipeline={p}", "train.micro_batch=1", "train.clip=0",
            "train.global_batch=16", "model.layers=4",
        )  # fmt: skip
        with layout_engine(recipe, comm) as engine:
            result = take_step(engine, make_batch(recipe, 0))
        norms.append(result.grad_norm)
        losses.append(result.loss)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-12)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize(
    "p", [pytest.param(n, marks=pytest.mark.mpi(n)) for n in (2, 4)]
)
def test_sends_may_all_be_synchronous(comm, monkeypatch, p, schedule):
    """A23: 64 KiB of activations, and no send that MPI may buffer."""
    monkeypatch.setattr(Communicator, "synchronous", True)
    sizes = ["model.width=128", "model.ffn=128", "model.context=64"]
    recipe = make_recipe(p, *words(schedule, (p, 1, 1), 8, *sizes))
    assert compare(recipe, comm, steps=1).above(1e-10) == {}


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize(
    "p", [pytest.param(n, marks=pytest.mark.mpi(n)) for n in (2, 4)]
)
def test_what_is_in_flight_and_sent(comm, p, m, schedule):
    if schedule == "dualpipe-v" and m < 2 * p:
        return
    recipe = make_recipe(p, *words(schedule, (p, 1, 1), m))
    sent, engine = count_step(recipe, comm)
    stage, v = engine.grid.pp.rank, CHUNKS[schedule]
    peak = simulate(engine.schedule).peak_in_flight[stage]
    assert engine.executor.peak_in_flight == peak * v
    formula = {
        "naive": 1, "gpipe": m, "1f1b": min(p - stage, m),
        "1f1b-eager": min(2 * (p - stage) - 1, m), "zb-h1": min(p, m),
        "zb-h2": min(2 * p - 1, m),
    }  # fmt: skip
    if schedule == "interleaved" and m % p == 0:
        formula["interleaved"] = min(2 * (p - 1 - stage) + (v - 1) * p + 1, m * v) / v
    if schedule == "zb-v" and m >= 2 * p:
        formula["zb-v"] = p
    assert peak == formula.get(schedule, peak)
    # Messages: (p v − 1) m activations and as many gradients over all stages, less
    # what a stage hands on to itself
    own = sum(messages(engine.schedule)[stage])
    nbytes = 2 * recipe.model.context * recipe.model.width * 8
    assert sent.get(("pp", "send"), (0, 0)) == (own, own * nbytes)
    total = comm.allreduce(own)
    at_home = 2 * m if engine.schedule.placement == "vee" else 0
    assert total == 2 * (p * v - 1) * m - at_home
    found = memory(engine)
    del found["rss_peak"]
    assert found == engine.predicted_memory()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.mpi(4)
def test_memory_with_a_pipeline(comm, schedule, precision, zero, recompute):
    more = [f"train.precision={precision}", f"parallel.zero={zero}"]
    more += [f"train.recompute={recompute}"]
    _, engine = count_step(make_recipe(4, *words(schedule, (2, 1, 2), 4, *more)), comm)
    found = memory(engine)
    del found["rss_peak"]
    assert found == engine.predicted_memory()
    assert engine.executor._saved == engine.executor._left == {}


@pytest.mark.mpi(2)
def test_a_schedule_may_come_from_a_file(comm, tmp_path):
    path = tmp_path / "mine.txt"
    path = comm.bcast(path)
    if comm.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# two stages\nF0 F1 B0 W0 BW1\nF0 BW0 F1 B1 W1\n")
    comm.Barrier()
    changes = [
        "parallel.pipeline=2",
        f"parallel.schedule={path}",
        "train.micro_batch=12",
    ]
    assert compare(make_recipe(2, *changes), comm, steps=2).above(1e-10) == {}
    for wrong in (
        "train.micro_batch=6",
        "parallel.chunks=2",
        "parallel.partition=1,1,0",
        "parallel.partition=2",
        "parallel.pipeline=1",
    ):
        with pytest.raises(ConfigError, match="must (be|have)"):
            recipe = make_recipe(2, *changes, wrong)
            plan_schedule(recipe, recipe.accumulation)


@pytest.mark.mpi(4)
def test_evaluation_runs_through_the_pipeline(comm):
    for schedule in ("1f1b", "zb-v", "interleaved"):
        losses = []
        for grid in ((1, 1, 4), (4, 1, 1)):
            name = schedule if grid[0] > 1 else "1f1b"
            changes = [*words(name, grid, 1), "model.layers=9"]
            recipe = make_recipe(4, *changes, "train.global_batch=8")
            with layout_engine(recipe, comm) as engine:
                batch = make_batch(recipe, 0)
                losses.append(engine.evaluate(own_batches(engine, batch), 100))
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)


# Mixed precision


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "2bw"])
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.mpi(4)
def test_16_bits_go_through_a_pipeline(comm, half, schedule, zero):
    """Near the serial model in that precision; tied weights stay equal to the bit."""
    chunks = CHUNKS.get(schedule, 1)
    more = [f"train.precision={half}", f"parallel.zero={zero}", "train.loss_scale=1024"]
    changes = words("1f1b", (2, 1, 2), 4, *more)
    changes += [f"parallel.schedule={schedule}", f"parallel.chunks={chunks}"]
    ends = []
    for layout in (changes, [*changes, "parallel.schedule=1f1b", "parallel.chunks=1"]):
        with layout_engine(make_recipe(4, *layout), comm) as engine:
            for _ in range(8):
                result = take_step(engine, make_batch(engine.recipe, 0))
            result = engine.drain() or result
            assert result.updated
            own = {}
            for parameters in engine.state.whole_units("values"):
                own |= {p.name: p.data.tobytes() for p in parameters}
            tied = comm.allgather(own.get("embedding.token.weight"))
            assert len({x for x in tied if x is not None}) == 1
            ends.append(result.loss)
    assert ends[0] == pytest.approx(ends[1], rel=0.2 if schedule == "2bw" else 5e-3)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.mpi(2)
def test_an_overflow_on_one_stage_is_skipped_by_all(comm, stage):
    recipe = make_recipe(
        2, "parallel.pipeline=2", "train.precision=fp16", "train.loss_scale=1024",
        "train.micro_batch=6",
    )  # fmt: skip
    with layout_engine(recipe, comm) as engine:
        assert take_step(engine, make_batch(recipe, 0)).updated
        finish = engine.state.gradients.finish

        def spoil():
            finish()
            if engine.grid.pp.rank == stage:
                engine.flat.grad[-1] = np.inf

        engine.state.gradients.finish = spoil
        assert not take_step(engine, make_batch(recipe, 1)).updated
        engine.state.gradients.finish = finish
        result = take_step(engine, make_batch(recipe, 2))
        assert result.updated and result.loss_scale == 512
        assert engine.optimizer.count == 2


# Unusual cuts


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.mpi(6)
def test_a_stage_without_blocks_shares_its_state_too(comm, zero):
    words = ["parallel.pipeline=3", "model.layers=3", f"parallel.zero={zero}"]
    words += ["parallel.partition=1,0,2", "train.micro_batch=3"]
    assert compare(make_recipe(6, *words), comm, steps=2).above(1e-10) == {}


@pytest.mark.parametrize("extra", ["", "train.recompute=full", "train.precision=bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.mpi(2)
def test_blocks_are_cut_by_the_time_they_take(comm, monkeypatch, schedule, extra):
    """The units do run; a clock of its own says what they take."""
    time_units, calls = stages._time_units, []

    def timed(*args):
        calls.append(time_units(*args))
        return np.array([0.0, 1.0, 4.0])

    monkeypatch.setattr(stages, "_time_units", timed)
    sizes = ["model.layers=8", "parallel.partition=measured"]
    recipe = make_recipe(2, *words(schedule, (2, 1, 1), 4), *sizes, *extra.split())
    with layout_engine(recipe, comm) as engine:
        # The head takes as long as four blocks; in the V its stage is the first one.
        expected = [6, 2] if schedule == "1f1b" else [1, 3, 3, 1]
        assert engine.block_counts == expected
        assert len(calls) == 3 and all(np.all(seconds > 0) for seconds in calls)
        take_step(engine, make_batch(recipe, 0))
