"""A run that is saved in one layout and goes on in another one is the run that was
never broken; in the same layout it is so to the bit."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

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
    read_arrays,
    reference,
    save_engine,
    take_step,
)

from mpipar.checkpoint import load, read_manifest, shard, snapshot
from mpipar.checkpoint import manifest as manifest_of
from mpipar.engine import Engine
from mpipar.engine import engine as engine_module

# Steps before the save, and after it
BEFORE, AFTER = 2, 1
STEPS = BEFORE + AFTER
MODELS = {
    "gpt": "model.layers=4 model.dropout=0.1",
    "llama": "model.family=llama model.layers=5 model.kv_heads=2 model.tied=false",
    "odd": "model.family=llama model.layers=7 model.width=24 model.kv_heads=1 "
    "model.ffn=36 model.vocab=53",
    "untied": "model.layers=4 model.tied=false train.recompute=selective",
}
# (ranks, words): every one is loaded by every other one of its table.
FOUR = [
    (1, "train.micro_batch=4"),
    (2, "parallel.pipeline=2 parallel.schedule=gpipe train.micro_batch=3"),
    (3, "parallel.zero=2 train.micro_batch=2"),
    (4, "parallel.tensor=4 parallel.sequence=true train.micro_batch=6"),
    (4, "parallel.pipeline=4 train.micro_batch=3"),
    (4, "parallel.zero=1 train.micro_batch=3 parallel.bucket_mb=0.01"),
    (4, "parallel.zero=3 parallel.zero_shard=2 parallel.unit=2 train.micro_batch=1"),
    (4, "parallel.tensor=2 parallel.pipeline=2 parallel.schedule=zb-h1 "
        "train.micro_batch=4"),
    (4, "parallel.tensor=2 parallel.zero=2 parallel.sequence=true "
        "train.micro_batch=3"),
    (4, "parallel.pipeline=2 parallel.schedule=interleaved parallel.zero=1 "
        "train.micro_batch=3"),
    (4, "parallel.tensor=2 parallel.pipeline=2 parallel.schedule=zb-v "
        "train.micro_batch=6"),
    (4, "parallel.tensor=2 parallel.zero=3 parallel.unit=3 train.micro_batch=6 "
        'parallel.order=["dp","tp","cp","pp"]'),
]  # fmt: skip
EIGHT = [
    (8, "parallel.tensor=2 parallel.pipeline=2 parallel.schedule=zb-v parallel.zero=2 "
        "train.micro_batch=3"),
    (8, "parallel.tensor=4 parallel.sequence=true parallel.zero=3 "
        "train.micro_batch=4"),
    (8, "parallel.zero=3 parallel.zero_shard=4 parallel.unit=2 train.micro_batch=3"),
    (8, "parallel.pipeline=4 parallel.schedule=zb-h2 parallel.zero=1 "
        "train.micro_batch=2"),
    (8, "parallel.pipeline=2 parallel.zero=2 parallel.zero_shard=2 "
        "train.micro_batch=6"),
    (6, "parallel.pipeline=2 parallel.zero=3 train.micro_batch=4"),
]  # fmt: skip


def recipe_of(model, layout):
    """Of one of the models, or of one that has these words."""
    ranks, words = layout
    batch = "train.global_batch=12" if layout in FOUR else "train.global_batch=24"
    return make_recipe(ranks, batch, *MODELS.get(model, model).split(), *words.split())


def state_of(engine):
    """The bits of all that the rank holds, kind by kind."""
    return [(f.name, f.box, f.begin, {k: x.tobytes() for k, x in f.arrays.items()})
            for f in engine.fragments()]  # fmt: skip


def steps_of(engine, first, last):
    """What these steps give, as numbers that must be equal."""
    results = [
        take_step(engine, make_batch(engine.recipe, s)) for s in range(first, last)
    ]
    return [(r.loss, r.grad_norm, r.lr, r.updated, r.loss_scale) for r in results]


@dataclass(frozen=True)
class Source:
    """A checkpoint of BEFORE steps, what is in it, and what an unbroken run gives."""

    folder: Path
    arrays: dict[str, np.ndarray]
    unbroken: tuple


def make_source(recipe, comm, run):
    """Trains, saves, and trains on without a break. Collective."""
    with layout_engine(recipe, comm) as engine:
        steps_of(engine, 0, BEFORE)
        folder = save_engine(engine, run)
    with layout_engine(recipe, comm) as engine:
        steps_of(engine, 0, BEFORE)
        unbroken = steps_of(engine, BEFORE, STEPS), state_of(engine)
    return Source(folder, read_arrays(folder) if comm.rank == 0 else {}, unbroken)


def differ(found, expected):
    """Names of arrays that differ in one bit or more, or are in one place only."""
    same = found.keys() & expected.keys()
    wrong = [n for n in same if found[n].dtype != expected[n].dtype]
    wrong += [n for n in same if found[n].tobytes() != expected[n].tobytes()]
    return sorted({*wrong, *(found.keys() ^ expected.keys())})


def unlike(folder, source):
    """Names of what another checkpoint has not got as the source has it."""
    ours, theirs = read_manifest(folder), read_manifest(source.folder)
    wrong = differ(read_arrays(folder), source.arrays)
    return wrong + ["progress"] * (ours.progress != theirs.progress)


def go_on(recipe, comm, source, run, *, same=False):
    """What is wrong on this rank after going on in a layout: names and errors.

    same   it is that of the source: all must be the same to the bit
    """
    exact, wrong = reference(recipe, STEPS), {}
    with layout_engine(recipe, comm) as engine:
        engine.restore(source.folder, read_manifest(source.folder))
        again = save_engine(engine, run)
        if comm.rank == 0:
            wrong |= dict.fromkeys(unlike(again, source), "changed by loading")
        results = steps_of(engine, BEFORE, STEPS)
        for step, (loss, norm, *_) in enumerate(results, BEFORE):
            wrong[f"loss {step}"] = off(loss, exact.losses[step])
            wrong[f"norm {step}"] = off(norm, exact.norms[step])
        wrong |= box_errors(engine, "values", exact.weights, exact.idle)
        if same and (results, state_of(engine)) != source.unbroken:
            wrong["unbroken run"] = "not the same bits"
    return {k: e for k, e in wrong.items() if isinstance(e, str) or not e <= FP64}


def hops(comm, tmp_path, model, layouts, numbers):
    """What is wrong on any rank, by target; the save is made in the first layout."""
    run, source = comm.bcast(tmp_path), numbers[0]
    saved, found = None, {}
    with first_ranks(comm, layouts[source][0]) as some:
        if some is not None:
            saved = make_source(recipe_of(model, layouts[source]), some, run / "source")
    folder = comm.bcast(saved and saved.folder)
    saved = saved or Source(folder, {}, ())
    for number in numbers:
        with first_ranks(comm, layouts[number][0]) as some:
            if some is not None:
                recipe = recipe_of(model, layouts[number])
                same = number == source
                wrong = go_on(recipe, some, saved, run / str(number), same=same)
                found |= {(layouts[number][1], k): e for k, e in wrong.items()}
    return {k: e for every in comm.allgather(found) for k, e in every.items()}


def cut_small(patch):
    """Every array is many blocks of a file, and many pieces of a snapshot."""
    patch.setattr(manifest_of, "BLOCK", 512)
    patch.setattr(shard, "BLOCK", 512)
    patch.setattr(snapshot, "PIECE_BYTES", 136)


def matrix():
    """Every layout of a table as the source, with its targets: all, or a few of them.

    The first target is the source itself.
    """
    for model in MODELS:
        for layouts in (FOUR, EIGHT):
            count = len(layouts)
            for source, (n, words) in enumerate(layouts):
                every = [(source + step) % count for step in range(count)]
                usual = layouts is FOUR and source % 4 == list(MODELS).index(model)
                few = [every[step] for step in ((0, 5) if usual else (0, 1, 5))]
                whole = layouts is FOUR and model == "llama" and not usual
                if layouts is EIGHT and (model != "llama" or source % 3):
                    continue
                if layouts is FOUR and not usual and source % 2:
                    continue
                marks = [pytest.mark.mpi(4 if layouts is FOUR else 8, timeout=240)]
                marks += [] if usual else [pytest.mark.full]
                name = f"{model} {n} {words}".replace("parallel.", "")
                chosen = every if whole else few
                yield pytest.param(model, layouts, chosen, marks=marks, id=name)


@pytest.mark.parametrize(("model", "layouts", "numbers"), list(matrix()))
def test_a_run_goes_on_in_every_layout(
    comm, tmp_path, monkeypatch, model, layouts, numbers
):
    """From the first of the layouts to all of them."""
    if numbers[0] // 2 % 2:
        cut_small(monkeypatch)
    assert hops(comm, tmp_path, model, layouts, numbers) == {}


# Controls: what the comparison above must notice


def forget_updates(patch):
    """The optimizer counts its updates from 0 again (A17)."""
    whole = Engine.restore

    def restore(self, folder, manifest):
        whole(self, folder, manifest)
        self.optimizer.count = 0

    patch.setattr(Engine, "restore", restore)


def forget_step(patch):
    """The learning rate begins anew."""
    whole = Engine.restore

    def restore(self, folder, manifest):
        whole(self, folder, manifest)
        self.number = 0

    patch.setattr(Engine, "restore", restore)


def forget_v(patch):
    """The second moments do not come back."""

    def some(folder, manifest, fragments, ops, kinds):
        return load(folder, manifest, fragments, ops, {"weights": "weights", "m": "m"})

    patch.setattr(engine_module, "load", some)


def rename(change):
    """A fault: fragments of a name are filled with what was saved of another one."""

    def plant(patch):
        def other(folder, manifest, fragments, ops, kinds):
            moved = [dataclasses.replace(f, name=change(f.name)) for f in fragments]
            return load(folder, manifest, moved, ops, kinds)

        patch.setattr(engine_module, "load", other)

    return plant


def swap_queries_and_keys(name):
    letters = {"q": "k", "k": "q"}
    return re.sub(r"(?<=^blocks\.1\.attention\.)[qk]", lambda m: letters[m[0]], name)


def swap_blocks(name):
    return re.sub(r"(?<=^blocks\.)[01]", lambda m: str(1 - int(m[0])), name)


def shift_parts(patch):
    """What ranks of one group share is saved one element on from where it lay (A43)."""
    whole = Engine._saved_arrays

    def shifted(self):
        return {k: [np.roll(x, 1) for x in xs] for k, xs in whole(self).items()}

    patch.setattr(Engine, "_saved_arrays", shifted)


CONTROLS = {
    "updates": (forget_updates, "progress"),
    "step": (forget_step, "loss 2"),
    "v": (forget_v, "v/blocks/0/mlp/up/weight"),
    "q and k": (rename(swap_queries_and_keys), "blocks/1/attention/q/weight"),
    "blocks": (rename(swap_blocks), "blocks/0/norm1/gain"),
    "parts": (shift_parts, "norm 2"),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(x, marks=[] if x in ("updates", "q and k") else pytest.mark.full)
        for x in CONTROLS
    ],
)
@pytest.mark.mpi(4)
def test_the_comparison_notices(comm, tmp_path, monkeypatch, fault):
    """On the layout of the save and on another one; in the weights of the next step."""
    plant, expected = CONTROLS[fault]
    plant(monkeypatch)
    found = hops(comm, tmp_path, "gpt", FOUR, [5, 4])
    for target in (5, 4):
        of_target = {key for words, key in found if words == FOUR[target][1]}
        assert expected in of_target
        assert any(key.endswith(".weight") for key in of_target)
    assert (FOUR[5][1], "unbroken run") in found
