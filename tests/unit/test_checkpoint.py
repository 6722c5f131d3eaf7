"""Checkpoints of one rank: what is found, what is refused, what a dead run left."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from mpipar.checkpoint import (
    find_checkpoint,
    load_weights,
    read_recipe_text,
    save_weights,
)
from mpipar.errors import CheckpointError
from mpipar.grid import serial_grid
from mpipar.layers.parameter import Parameter
from mpipar.ops import make_ops

OPS = make_ops("cpu", "fp64")
SHAPES = {"embedding.token.weight": (7, 4), "blocks.0.mlp.up.weight": (6, 4),
          "blocks.0.norm1.gain": (4,)}  # fmt: skip


def make_parameters(seed: int = 0) -> list[Parameter]:
    rng = np.random.default_rng(seed)
    made = []
    for name, shape in SHAPES.items():
        box = tuple((0, size) for size in shape)
        made.append(Parameter(name, shape, box, "zeros", data=rng.normal(size=shape)))
    return made


def save(run: Path, step: int, seed: int = 0) -> Path:
    recipe = f"recipe of step {step}"
    return save_weights(run, step, recipe, [make_parameters(seed)], serial_grid(), OPS)


def load(file: Path) -> list[np.ndarray]:
    parameters = make_parameters(99)
    load_weights(file, parameters, OPS)
    return [p.data for p in parameters]


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    folder = save(tmp_path, 12)
    assert folder == tmp_path / "checkpoints" / "step_00000012"
    for found, p in zip(load(folder / "model.h5"), make_parameters(), strict=True):
        assert np.array_equal(found, p.data)
    with h5py.File(folder / "model.h5") as file:
        assert file["blocks/0/mlp/up/weight"].shape == (6, 4)
        assert file.attrs["step"] == 12


def test_any_way_to_name_a_checkpoint_finds_it(tmp_path: Path) -> None:
    first, last = save(tmp_path, 5), save(tmp_path, 10)
    for path in (tmp_path, tmp_path / "checkpoints", last, last / "model.h5"):
        assert find_checkpoint(path) == last / "model.h5"
    assert find_checkpoint(first) == first / "model.h5"
    assert read_recipe_text(first / "model.h5") == "recipe of step 5"


def test_what_a_dead_run_left_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    draft = tmp_path / "checkpoints" / "step_00000002.tmp"
    (draft / "deep").mkdir(parents=True)
    (draft / "model.h5").write_bytes(b"half of a file")
    (draft / "deep" / "junk").write_text("")
    (tmp_path / "checkpoints" / "latest.tmp").write_text("step_00000009")
    folder = save(tmp_path, 2, seed=2)
    assert sorted(p.name for p in folder.iterdir()) == ["model.h5"]
    names = sorted(p.name for p in folder.parent.iterdir())
    assert names == ["latest", "step_00000001", "step_00000002"]
    assert np.array_equal(load(folder / "model.h5")[0], make_parameters(2)[0].data)


def test_a_draft_is_never_found(tmp_path: Path) -> None:
    draft = tmp_path / "checkpoints" / "step_00000002.tmp"
    draft.mkdir(parents=True)
    (draft / "model.h5").write_bytes(b"half of a file")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("blocked", ["checkpoints", "checkpoints/latest.tmp"])
def test_a_failed_save_leaves_the_last_one(tmp_path: Path, blocked: str) -> None:
    if blocked == "checkpoints":
        (tmp_path / blocked).write_text("a file")
    else:
        save(tmp_path, 1)
        (tmp_path / blocked).mkdir()
    with pytest.raises(CheckpointError, match="cannot save .*step_00000002") as caught:
        save(tmp_path, 2)
    assert caught.value.agreed
    if blocked != "checkpoints":
        assert find_checkpoint(tmp_path).parent.name == "step_00000001"


@pytest.mark.parametrize("said", ["step_00000009", "", "\0", "é" * 400])
def test_a_pointer_to_nothing_is_refused_by_name(tmp_path: Path, said: str) -> None:
    save(tmp_path, 1)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.write_text(said, encoding="latin-1")
    with pytest.raises(CheckpointError, match="latest"):
        find_checkpoint(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="no checkpoint: expected model"):
            find_checkpoint(path)


def cut_in_half(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def forget_header(file: Path) -> None:
    with h5py.File(file, "a") as h5:
        for key in list(h5.attrs):
            del h5.attrs[key]


def become_other_format(file: Path) -> None:
    with h5py.File(file, "a") as h5:
        h5.attrs["format"] = 999


def forget_recipe(file: Path) -> None:
    with h5py.File(file, "a") as h5:
        del h5.attrs["recipe"]


def store_header_as_array(file: Path) -> None:
    with h5py.File(file, "a") as h5:
        h5.attrs["format"] = np.array([1, 1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(bytes(range(256)) * 30),
        cut_in_half, forget_header, become_other_format, forget_recipe,
        store_header_as_array,
    ],
    ids=["empty", "noise", "half", "foreign", "format", "recipe", "array"],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, damage) -> None:
    file = save(tmp_path, 1) / "model.h5"
    damage(file)
    with pytest.raises(CheckpointError, match="model.h5"):
        read_recipe_text(find_checkpoint(tmp_path))


def test_each_missing_or_misshapen_array_is_named(tmp_path: Path) -> None:
    file = save(tmp_path, 1) / "model.h5"
    with h5py.File(file, "a") as h5:
        del h5["embedding/token/weight"], h5["blocks/0/norm1/gain"]
        h5["embedding/token/weight"] = np.zeros((4, 7))
        h5.create_group("blocks/0/norm1/gain")
    with pytest.raises(CheckpointError) as caught:
        load(file)
    text = str(caught.value)
    assert "embedding.token.weight has shape (4, 7), expected (7, 4)" in text
    assert "blocks.0.norm1.gain is missing" in text and "mlp" not in text


def test_an_array_of_no_numbers_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path, 1) / "model.h5"
    with h5py.File(file, "a") as h5:
        del h5["blocks/0/norm1/gain"]
        h5["blocks/0/norm1/gain"] = ["a", "b", "c", "d"]
    with pytest.raises(CheckpointError, match=r"blocks.0.norm1.gain"):
        load(file)


def test_data_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    file = save(tmp_path, 1) / "model.h5"
    with h5py.File(file, "a") as h5:
        del h5["blocks/0/norm1/gain"]
        compressed = h5.create_dataset(
            "blocks/0/norm1/gain", data=np.arange(4.0), chunks=(4,), compression="gzip"
        )
        chunk = compressed.id.get_chunk_info(0)
    with file.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    with pytest.raises(CheckpointError, match="model.h5"):
        load(file)
