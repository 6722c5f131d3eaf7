"""What goes wrong when runs go on, case by case, and what a rank reads."""

from contextlib import contextmanager

import numpy as np
import pytest
from parity.build import (
    FP64,
    box_errors,
    first_ranks,
    layout_engine,
    make_batch,
    make_recipe,
    off,
    own_batches,
    read_arrays,
    reference,
    save_engine,
    take_step,
)
from parity.test_resume import cut_small, differ

from mpipar.checkpoint import load, read_manifest
from mpipar.layers.base import Step


@contextmanager
def some_engine(comm, recipe):
    """An engine on the recipe's ranks, which come first; None on the others."""
    n = int(np.prod([*recipe.parallel.axes.values()]))
    with first_ranks(comm, n) as some:
        if some is None:
            yield None
        else:
            with layout_engine(recipe, some) as engine:
                yield engine


def restore(engine, folder):
    engine.restore(folder, read_manifest(folder))


def constant(engine, value):
    """Every gradient of the engine is this value from here on."""
    whole = engine.gradients

    def gradients(batches, valid):
        loss = whole(batches, valid)
        for piece in engine.state.pieces():
            piece.grad[...] = value
        return loss

    engine.gradients = gradients


@pytest.mark.mpi(4)
def test_the_count_of_updates_comes_back(comm, tmp_path):
    """A17"""
    words = ["train.clip=0", "optimizer.weight_decay=0", "optimizer.warmup=0",
             "optimizer.schedule=constant", "optimizer.beta2=0.999",
             "optimizer.eps=1e-8", "train.global_batch=12",
             "model.layers=1"]  # fmt: skip
    run, moved = comm.bcast(tmp_path), []
    recipe = make_recipe(4, *words, "parallel.zero=1", "train.micro_batch=3")
    with layout_engine(recipe, comm) as engine:
        constant(engine, 1.0)
        for step in range(10):
            take_step(engine, make_batch(recipe, step))
        folder = save_engine(engine, run)
    for n, layout in ((4, "parallel.zero=1"), (2, "parallel.zero=3"), (1, "")):
        recipe = make_recipe(n, *words, "train.micro_batch=3", *layout.split())
        with some_engine(comm, recipe) as engine:
            if engine is None:
                continue
            restore(engine, folder)
            constant(engine, 1.0)
            before = [p.data.copy() for p in engine.state.pieces()]
            take_step(engine, make_batch(recipe, 10))
            for old, piece in zip(before, engine.state.pieces(), strict=True):
                used = slice(0, max(0, piece.unit.filled - piece.begin))
                moved += [*(piece.data - old)[used]]
    assert len(moved) and np.allclose(moved, -0.01, rtol=1e-6, atol=0)


def logits_of(engine):
    """Logits of the last place of a few sequences of each length."""
    batch, found = make_batch(engine.recipe, 5), []
    for length in (1, 7, 16):
        step = Step(
            positions=np.arange(length), samples=batch.samples[:3], training=False
        )
        found.append(engine.model.logits(batch.tokens[:3, :length], step))
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("family", "chain"),
    [
        ("llama", (2, 1, 4, 2)),
        pytest.param("gpt", (4, 2, 1, 4), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.mpi(4)
def test_queries_keys_and_values_find_their_places(comm, tmp_path, family, chain):
    """A41: also where ranks hold copies of keys and values, tp above KV = 2."""
    run, folders, logits = comm.bcast(tmp_path), [], []
    sizes = ["model.layers=4", "model.kv_heads=2", f"model.family={family}"]
    for number, tp in enumerate(chain):
        recipe = make_recipe(tp, *sizes, f"parallel.tensor={tp}", "train.micro_batch=6")
        own = None
        with some_engine(comm, recipe) as engine:
            if engine is not None:
                if folders:
                    restore(engine, folders[-1])
                else:
                    take_step(engine, make_batch(recipe, 0))
                own = logits_of(engine), save_engine(engine, run / str(number))
        every = [x for x in comm.allgather(own) if x]
        logits += [x for x, _ in every]
        folders.append(every[0][1])
    assert np.ptp(logits, axis=0).max() < 1e-12 * np.abs(logits).max()
    for folder in folders[1:]:
        assert differ(read_arrays(folder), read_arrays(folders[0])) == []


def fill(engine, scale):
    """Layer i gets i + 1 times the scale, and its moments 10 and 20 more than i + 1."""
    for f in engine.fragments():
        if f.name.startswith("blocks."):
            layer = int(f.name.split(".")[1]) + 1
            f.arrays["weights"][...] = layer * scale
            f.arrays["m"][...] = layer + 10
            f.arrays["v"][...] = layer + 20
    engine.state.updated()


def layers_of(engine):
    """(layer, the values of weights, m and v) of each tensor in a block."""
    return [
        (int(f.name.split(".")[1]), *(set(x.tolist()) for x in f.arrays.values()))
        for f in engine.fragments()
        if f.name.startswith("blocks.")
    ]


@pytest.mark.parametrize(
    ("schedule", "chain"),
    [
        ("1f1b", (1, 2, 4, 1)),
        pytest.param("zb-v", (2, 1, 4), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.mpi(4)
def test_every_stage_finds_its_own_layers(comm, tmp_path, schedule, chain):
    """A42"""
    run, folder, losses = comm.bcast(tmp_path), None, []
    for number, pp in enumerate(chain):
        words = [f"parallel.pipeline={pp}", "model.layers=8", "train.micro_batch=6"]
        words += [f"parallel.schedule={schedule}"] if pp > 1 else []
        own = None
        with some_engine(comm, make_recipe(pp, *words)) as engine:
            if engine is not None:
                fill(engine, 0.01 if folder is None else np.nan)
                if folder is not None:
                    restore(engine, folder)
                batch = own_batches(engine, make_batch(engine.recipe, 0))
                loss = engine.evaluate(batch, 100)
                own = layers_of(engine), loss, save_engine(engine, run / str(number))
        every = [x for x in comm.allgather(own) if x]
        tensors = [t for found, *_ in every for t in found]
        assert sorted(i for i, *_ in tensors) == sorted([*range(8)] * 16)
        for i, *values in tensors:
            assert values == [{(i + 1) * 0.01}, {i + 11.0}, {i + 21.0}]
        for stage, (found, *_) in enumerate(every):
            if schedule == "1f1b":
                first = stage * 8 // pp
                assert {i for i, *_ in found} == {*range(first, first + 8 // pp)}
        losses += [loss for _, loss, _ in every]
        folder = every[0][2]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)


@pytest.mark.mpi(4)
def test_parts_of_any_number_of_ranks_fit(comm, tmp_path, monkeypatch):
    """A43: width 30; the padding behind every unit differs from hop to hop."""
    cut_small(monkeypatch)
    sizes = ["model.width=30", "model.heads=3", "model.ffn=50", "train.micro_batch=2"]
    run, folder = comm.bcast(tmp_path), None
    for step, (n, zero) in enumerate([(4, 2), (3, 3), (1, 0), (4, 1)]):
        recipe = make_recipe(n, *sizes, f"parallel.zero={zero}")
        exact, own = reference(recipe, step + 1), None
        with some_engine(comm, recipe) as engine:
            if engine is not None:
                again = None
                if folder is not None:
                    restore(engine, folder)
                    again = save_engine(engine, run / f"again {step}")
                result = take_step(engine, make_batch(recipe, step))
                errors = box_errors(engine, "values", exact.weights, exact.idle)
                errors["loss"] = off(result.loss, exact.losses[step])
                errors["norm"] = off(result.grad_norm, exact.norms[step])
                errors = {k: e for k, e in errors.items() if not e <= FP64}
                own = errors, again, save_engine(engine, run / str(step))
        every = [x for x in comm.allgather(own) if x]
        assert [errors for errors, *_ in every] == [{}] * n
        _, again, following = every[0]
        if folder is not None:
            assert differ(read_arrays(again), read_arrays(folder)) == []
        folder = following


# What a rank reads

KINDS, SMALL = 3, 512


@pytest.mark.parametrize(
    "words",
    [
        "parallel.pipeline=4",
        "parallel.zero=1",
        "parallel.zero=2 parallel.unit=2",
        "parallel.zero=3",
        "parallel.zero=3 parallel.zero_shard=2",
        "",
        "parallel.pipeline=2 parallel.zero=3",
        "parallel.tensor=2 parallel.zero=1",
    ],
)
@pytest.mark.mpi(4)
def test_a_rank_reads_what_it_holds(comm, tmp_path, monkeypatch, words):
    """On the layout of the save every block once, and of copies a block more each."""
    cut_small(monkeypatch)
    sizes = ["model.layers=4", "train.micro_batch=3", "model.tied=false"]
    recipe = make_recipe(4, *sizes, *words.split())
    with layout_engine(recipe, comm) as engine:
        folder = save_engine(engine, comm.bcast(tmp_path))
        fragments = engine.fragments()
        got = load(folder, read_manifest(folder), fragments, engine.ops)
        owned = {f.name for f in engine.fragments(share=True)}
    held = KINDS * 8 * sum(f.size for f in fragments)
    copies = [f for f in fragments if f.name not in owned]
    if "tensor" in words:
        assert copies or comm.rank % 2 == 0
        assert held <= got <= held + KINDS * 2 * SMALL * len(copies)
    else:
        assert got == held


@pytest.mark.parametrize("source", [(1, ""), (4, "parallel.zero=3")], ids=str)
@pytest.mark.mpi(4)
def test_a_rank_reads_little_more_than_it_needs(comm, tmp_path, monkeypatch, source):
    """From another layout: of rows, a block more at either end of what a file has."""
    cut_small(monkeypatch)
    run, (n, words), folder = comm.bcast(tmp_path), source, None
    sizes = ["model.width=64", "model.ffn=256", "train.micro_batch=3"]
    with some_engine(comm, make_recipe(n, *sizes, *words.split())) as engine:
        if engine is not None:
            folder = save_engine(engine, run)
    folder = comm.bcast(folder)
    recipe, manifest = (
        make_recipe(4, *sizes, "parallel.tensor=4"),
        read_manifest(folder),
    )
    with layout_engine(recipe, comm) as engine:
        for f in engine.fragments():
            got = load(folder, manifest, [f], engine.ops)
            has_rows = len(f.shape) == 1 or f.box[1] == (0, f.shape[1])
            size = f.size if has_rows else int(np.prod(f.shape))
            assert KINDS * 8 * f.size <= got, f.name
            assert got <= KINDS * (8 * size + 2 * SMALL * n), f.name
