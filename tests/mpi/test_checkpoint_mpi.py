"""Checkpoints and generation do not show on how many ranks they were made."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpipar.checkpoint import global_arrays, load_weights, save_weights
from mpipar.config import Recipe, read_recipe, replace, resolve, to_toml
from mpipar.errors import CheckpointError, ConfigError
from mpipar.generate import run_generation
from mpipar.generate.run import generate
from mpipar.grid import Grid, serial_grid
from mpipar.models import build_model
from mpipar.ops import make_ops
from mpipar.zero.flat import FlatState

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


def save(comm: Any, folder: Path, family: str, tensor: int) -> Path:
    """Save from a layout with so many ranks of tp, the others of dp."""
    recipe = read(family)
    with Grid(comm, {"tp": tensor, "dp": comm.size // tensor}) as grid:
        _, flat = make(recipe, grid)
        return save_weights(folder, 3, to_toml(recipe), [flat.parameters], grid, OPS)


def check_whole(file: Path, family: str) -> None:
    with h5py.File(file) as h5:
        exact = serial_arrays(read(family))
        names = []
        h5.visititems(lambda n, x: names.append(n) if hasattr(x, "shape") else None)
        assert sorted(names) == sorted(name.replace(".", "/") for name in exact)
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
        check_whole(saved / "model.h5", family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor", [2, 4])
@ranks(4)
def test_four_ranks_save_the_whole_model(
    comm: Any, folder: Path, family: str, tensor: int
) -> None:
    saved = save(comm, folder, family, tensor)
    if comm.rank == 0:
        check_whole(saved / "model.h5", family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
@ranks(4)
def test_weights_move_to_another_layout(
    comm: Any, folder: Path, family: str, before: int, after: int
) -> None:
    file = save(comm, folder, family, before) / "model.h5"
    with Grid(comm, {"tp": after, "dp": comm.size // after}) as grid:
        _, flat = make(read(family), grid, seed=99)
        load_weights(file, flat.parameters, OPS)
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
def test_a_missing_array_is_named_once_by_all(comm: Any, folder: Path) -> None:
    saved = save(comm, folder, "gpt", 2)
    if comm.rank == 0:
        with h5py.File(saved / "model.h5", "a") as h5:
            del h5["blocks/1/mlp/up/weight"]
    comm.Barrier()
    with pytest.raises(CheckpointError) as caught:
        run_generation(folder, comm, "x")
    assert caught.value.agreed
    assert str(caught.value).count("blocks.1.mlp.up.weight is missing") == 1


@ranks(2)
def test_an_error_of_the_writing_rank_is_everyones(comm: Any, folder: Path) -> None:
    if comm.rank == 0:
        (folder / "checkpoints").write_text("a file in the way")
    comm.Barrier()
    with pytest.raises(CheckpointError, match="cannot save .*step_00000003") as caught:
        save(comm, folder, "gpt", 2)
    assert caught.value.agreed


@ranks(2)
def test_a_checkpoint_keeps_the_recipe_of_its_run(comm: Any, folder: Path) -> None:
    recipe = resolve(replace(read("llama"), {"parallel.tensor": 2}), 2)
    text = to_toml(recipe)
    with Grid(comm, {"tp": 2}) as grid:
        _, flat = make(recipe, grid)
        saved = save_weights(folder, 3, text, [flat.parameters], grid, OPS)
    with h5py.File(saved / "model.h5") as h5:
        assert h5.attrs["recipe"] == text
