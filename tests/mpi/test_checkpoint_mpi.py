"""Checkpoints and generation do not show on how many ranks they were made."""

import errno
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from saved import facts_of, names, tamper

from mpipar.checkpoint import (
    Facts,
    Progress,
    Saved,
    Saver,
    fragments_of,
    load,
    read_manifest,
    whole_fragments,
)
from mpipar.config import Recipe, read_recipe, replace, resolve, to_toml
from mpipar.errors import CheckpointError, ConfigError
from mpipar.generate import run_generation
from mpipar.generate.run import generate
from mpipar.grid import Grid, serial_grid
from mpipar.models import build_model
from mpipar.ops import make_ops
from mpipar.verify.gather import global_arrays
from mpipar.zero.flat import FlatState, Piece

TEXT = """
[model]
family = "{family}"
layers = 2
width = 32
heads = 4
kv_heads = 2
context = 24
vocab = 257
tied = {tied}
[train]
steps = 1
global_batch = 4
precision = "fp64"
"""
OPS = make_ops("cpu", "fp64")
FAMILIES = ("gpt", "llama")
ranks = pytest.mark.mpi


def read(family: str) -> Recipe:
    tied = str(family == "gpt").lower()
    return read_recipe(TEXT.format(family=family, tied=tied), ranks=1)


def make(recipe: Recipe, grid: Any, seed: int = 7) -> tuple[Any, FlatState]:
    """A model on this grid, with weights that make different tokens likely."""
    model = build_model(recipe.model, ops=OPS, tp=grid.tp, sequence=False)
    flat = FlatState(model.groups().parameters, OPS)
    flat.initialize(seed)
    flat.data *= 12
    return model, flat


def serial_arrays(recipe: Recipe, seed: int = 7) -> dict[str, np.ndarray]:
    _, flat = make(recipe, serial_grid(), seed)
    return {p.name: p.data for p in flat.parameters}


@pytest.fixture
def folder(comm: Any, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return comm.bcast(tmp_path)


def save_flat(folder: Path, flat: FlatState, grid: Any, recipe: Recipe) -> Saved:
    """Save the weights of all ranks; those that hold the same ones share them."""
    grad = grid.grad
    pieces = [
        Piece(u, 0, u.size, flat.data[u.stretch], None, grad.rank, grad.size)
        for u in flat.units
    ]
    weights = {"weights": [piece.data for piece in pieces]}
    fragments = list(fragments_of(pieces, weights, share=True))
    facts = Facts("a run", to_toml(recipe), grid.describe(), Progress(step=3))
    with Saver(folder, grid.world, OPS) as saver:
        saver.begin(facts, fragments, ["weights"])
        return saver.finish()


def save(comm: Any, folder: Path, family: str, tensor: int) -> Path:
    """Save from a layout with so many ranks of tp, the others of dp."""
    recipe = read(family)
    with Grid(comm, {"tp": tensor, "dp": comm.size // tensor}) as grid:
        _, flat = make(recipe, grid)
        saved = save_flat(folder, flat, grid, recipe)
    assert saved.error is None
    return saved.folder


def check_whole(folder: Path, family: str, ranks: int) -> None:
    """Each rank has written a file, and together they have the whole model."""
    shards = [f"shard_{rank:05d}.h5" for rank in range(ranks)]
    assert names(folder) == ["manifest.json", "model.h5", *shards]
    sizes = [shard.elements for shard in read_manifest(folder).shards]
    assert max(sizes) < 1.5 * min(sizes)
    with h5py.File(folder / "model.h5") as h5:
        exact = serial_arrays(read(family))
        found = []
        h5.visititems(lambda n, x: found.append(n) if hasattr(x, "shape") else None)
        assert sorted(found) == sorted(name.replace(".", "/") for name in exact)
        for name, array in exact.items():
            assert np.array_equal(h5[name.replace(".", "/")][()], array), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor", [1, 2])
@ranks(2)
def test_two_ranks_save_the_whole_model(
    comm: Any, folder: Path, family: str, tensor: int
) -> None:
    saved = save(comm, folder, family, tensor)
    if comm.rank == 0:
        check_whole(saved, family, comm.size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor", [2, 4])
@ranks(4)
def test_four_ranks_save_the_whole_model(
    comm: Any, folder: Path, family: str, tensor: int
) -> None:
    saved = save(comm, folder, family, tensor)
    if comm.rank == 0:
        check_whole(saved, family, comm.size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
@ranks(4)
def test_weights_move_to_another_layout(
    comm: Any, folder: Path, family: str, before: int, after: int
) -> None:
    saved = save(comm, folder, family, before)
    with Grid(comm, {"tp": after, "dp": comm.size // after}) as grid:
        _, flat = make(read(family), grid, seed=99)
        load(saved, read_manifest(saved), whole_fragments(flat.parameters), OPS)
        found = dict(global_arrays(flat.parameters, lambda p: p.data, grid, OPS.dtype))
    if comm.rank == 0:
        for name, array in serial_arrays(read(family)).items():
            assert np.array_equal(found[name], array), name


@pytest.mark.parametrize("family", FAMILIES)
@ranks(4)
def test_every_layout_draws_the_same_tokens(comm: Any, family: str) -> None:
    recipe = read(family)
    for temperature in (0.0, 1.5):
        options = {"temperature": temperature, "top_k": 0, "seed": 5, "tokens": 16}
        ids = np.array([5, 250, 3])
        model, _ = make(recipe, serial_grid())
        exact = list(generate(model, OPS, ids, 24, **options))
        assert len(set(exact)) > 3
        for tensor in (2, 4):
            with Grid(comm, {"tp": tensor, "dp": comm.size // tensor}) as grid:
                model, _ = make(recipe, grid)
                found = list(generate(model, OPS, ids, 24, **options))
            assert found == exact, (tensor, temperature)


@pytest.mark.parametrize("family", FAMILIES)
@ranks(2)
def test_generation_says_the_same_on_any_ranks(
    comm: Any, folder: Path, family: str, capsys: pytest.CaptureFixture
) -> None:
    save(comm, folder, family, 1)
    alone, options = comm.Split(comm.rank), {"tokens": 15, "temperature": 1.0}
    run_generation(folder, alone, "abc", **options, seed=2)
    exact = capsys.readouterr().out
    alone.Free()
    run_generation(folder, comm, "abc", **options, seed=2)
    together = capsys.readouterr().out
    assert exact.startswith("abc") and exact.endswith("\n") and len(exact) > 8
    assert together == (exact if comm.rank == 0 else "")


@ranks(2)
def test_a_full_context_is_said(
    comm: Any, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    save(comm, folder, "gpt", 2)
    prompt = "x" * 20
    for tokens, is_full in ((4, False), (5, True)):
        run_generation(folder, comm, prompt, tokens=tokens)
        output = capsys.readouterr().out
        assert output.endswith("\n[context full]\n") is (is_full and comm.rank == 0)
    run_generation(folder, comm, prompt + "yyyy", tokens=1)
    output = capsys.readouterr().out
    assert output == (f"{prompt}yyyy\n[context full]\n" if comm.rank == 0 else "")


@ranks(2)
def test_what_generation_cannot_do_is_refused_by_all(comm: Any, folder: Path) -> None:
    save(comm, folder, "gpt", 2)
    with pytest.raises(ConfigError, match="25 tokens") as caught:
        run_generation(folder, comm, "x" * 25)
    assert caught.value.agreed
    with pytest.raises(ConfigError, match="--tokens.*\n.*--top-k") as caught:
        run_generation(folder, comm, "x", tokens=-1, top_k=-1)
    assert caught.value.agreed
    with pytest.raises(CheckpointError, match="nowhere is no checkpoint") as caught:
        run_generation(folder / "nowhere", comm, "x")
    assert caught.value.agreed


@ranks(2)
def test_missing_arrays_are_named_once_by_all(comm: Any, folder: Path) -> None:
    saved = save(comm, folder, "gpt", 2)
    if comm.rank == 0:
        change = ("layers = 2", "layers = 3")
        tamper(saved, lambda body: body.update(recipe=body["recipe"].replace(*change)))
    comm.Barrier()
    with pytest.raises(CheckpointError) as caught:
        run_generation(folder, comm, "x")
    assert caught.value.agreed
    assert str(caught.value).count("blocks.2.mlp.up.weight is missing") == 1
    assert "blocks.1." not in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
@ranks(2)
def test_an_error_of_one_rank_is_everyones(
    comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = save(comm, folder, "gpt", 2)
    recipe = read("gpt")
    with Grid(comm, {"dp": 2}) as grid, Saver(folder, grid.world, OPS, keep=1) as saver:
        _, flat = make(recipe, grid)
        fragments = whole_fragments(flat.parameters) if comm.rank == rank else []
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            saver.begin(facts_of(4), fragments, ["weights"])
            error = saver.finish().error
        assert isinstance(error, CheckpointError) and error.agreed
        assert str(error).count("cannot save") == 1
        assert str(error).startswith(f"rank {rank}: cannot save")
        comm.Barrier()
        assert names(folder / "checkpoints") == ["latest", first.name]
        comm.Barrier()
        # One rank alone may have all there is.
        saver.begin(facts_of(5), fragments, ["weights"])
        saved = saver.finish()
        assert saved.error is None
        assert f"shard_{rank:05d}.h5" in names(saved.folder)
        assert len(names(saved.folder)) == 3


@ranks(2)
def test_a_save_ends_when_all_ranks_are_ready(comm: Any, folder: Path) -> None:
    """As in a run: each rank says so in a message that it sends anyway."""
    recipe, steps = read("gpt"), 0
    with Grid(comm, {"dp": 2}) as grid, Saver(folder, grid.world, OPS) as saver:
        _, flat = make(recipe, grid)
        exact = flat.data.copy()
        saver.begin(facts_of(4), whole_fragments(flat.parameters[comm.rank :: 2]),
                    ["weights"])  # fmt: skip
        saved = None
        while saved is None:
            ready = grid.world.all_reduce(np.array([float(saver.ready)]))
            saver.freeze()
            flat.data += 1
            steps += 1
            if ready[0] == comm.size:
                saved = saver.advance()
        assert saved.error is None and not saver.is_open and steps > 1
        fresh = FlatState([flat.parameters], OPS)
        load(saved.folder, read_manifest(saved.folder),
             whole_fragments(fresh.parameters), OPS)  # fmt: skip
        assert np.array_equal(fresh.data, exact)


@ranks(2)
def test_a_checkpoint_keeps_the_recipe_of_its_run(comm: Any, folder: Path) -> None:
    recipe = resolve(replace(read("llama"), {"parallel.tensor": 2}), 2)
    text = to_toml(recipe)
    with Grid(comm, {"tp": 2}) as grid:
        _, flat = make(recipe, grid)
        saved = save_flat(folder, flat, grid, recipe)
    assert read_manifest(saved.folder).recipe == text
    assert "tp" in read_manifest(saved.folder).layout
    with h5py.File(saved.folder / "model.h5") as h5:
        assert h5.attrs["recipe"] == text
