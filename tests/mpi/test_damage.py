"""A39: damaged checkpoints are refused on all ranks, by file and parameter.

Two data ranks with ZeRO, so that a rank reads only its own half of the moments: damage
there is seen by one rank alone.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from parity.build import layout_engine, make_recipe, write_tokens
from saved import names, tamper

from mpipar.checkpoint import checkpoints, read_manifest
from mpipar.config import Recipe
from mpipar.engine import Engine
from mpipar.errors import CheckpointError
from mpipar.train import run_training

ranks = pytest.mark.mpi(2)
NEWEST = "step_00000004"
_made: dict[str, Path] = {}


@pytest.fixture
def recipe(comm: Any, tmp_path: Path) -> Recipe:
    words = ["train.steps=4", "checkpoint.every=2", "parallel.zero=1", "model.layers=1"]
    # The same updates, whatever the last step is
    words.append("optimizer.schedule=constant")
    source = f"data.source={write_tokens(comm, comm.bcast(tmp_path))}"
    return make_recipe(2, source, "data.validation=0", *words)


@pytest.fixture
def run(comm: Any, tmp_path: Path, recipe: Recipe) -> Path:
    """A run of its own with checkpoints of steps 2 and 4. Collective."""
    folder = comm.bcast(tmp_path)
    if "run" not in _made:
        _made["run"] = folder.parent / "made"
        assert run_training(recipe, comm, _made["run"]) == 0
    if comm.rank == 0:
        shutil.copytree(_made["run"], folder / "run")
    comm.Barrier()
    return folder / "run"


def shard(folder: Path, rank: int = 1) -> Path:
    return folder / f"shard_{rank:05d}.h5"


def go_on(comm: Any, recipe: Recipe, run: Path, resume: str = "auto") -> int:
    """Two more steps."""
    longer = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"steps": 6})}
    )
    return run_training(longer, comm, run, resume)


def refusal(comm: Any, recipe: Recipe, run: Path, resume: str = "auto") -> str:
    """Why no rank goes on; nothing has changed by trying."""
    before = (run / "metrics.jsonl").read_bytes(), names(run / "checkpoints")
    comm.Barrier()
    with pytest.raises(CheckpointError) as caught:
        go_on(comm, recipe, run, resume)
    assert caught.value.agreed and caught.value.exit_code == 4
    text = str(caught.value)
    assert comm.allgather(text) == [text] * 2
    assert before == ((run / "metrics.jsonl").read_bytes(), names(run / "checkpoints"))
    return text


# What can happen to a file


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 0x10]))


def flip_in(kind: str, part: float) -> Callable[[Path], None]:
    """One bit of a dataset, so far into it."""

    def change(folder: Path) -> None:
        entry = read_manifest(folder).shards[1]
        place = entry.offsets[kind] + int(8 * entry.elements * part)
        flip(shard(folder), place)

    return change


def flip_outside(folder: Path) -> None:
    entry = read_manifest(folder).shards[1]
    assert min(entry.offsets.values()) > 200
    flip(shard(folder), 100)


def edit(change: Callable[[h5py.File], Any]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        with h5py.File(shard(folder), "r+", locking=False) as h5:
            change(h5)

    return edited


def reshape(h5: h5py.File) -> None:
    data = h5["m"][()]
    del h5["m"]
    h5["m"] = data[: len(data) // 2 * 2].reshape(-1, 2)


def swap(folder: Path) -> None:
    one, two, aside = shard(folder, 0), shard(folder, 1), folder / "aside"
    one.rename(aside), two.rename(one), aside.rename(two)


def cut(folder: Path) -> None:
    size = shard(folder).stat().st_size
    with shard(folder).open("r+b") as raw:
        raw.truncate(size - 100)


def take_old(folder: Path) -> None:
    """The file of an earlier save, of the same size."""
    shutil.copy(shard(folder.with_name("step_00000002")), shard(folder))


DAMAGES = {
    "cut": cut,
    "lengthened": lambda folder: shard(folder).write_bytes(
        shard(folder).read_bytes() + b"\0"
    ),
    "empty": lambda folder: shard(folder).write_bytes(b""),
    "zeros": lambda folder: shard(folder).write_bytes(
        bytes(shard(folder).stat().st_size)
    ),
    "deleted": lambda folder: shard(folder).unlink(),
    "renamed dataset": edit(lambda h5: h5.move("m", "n")),
    "unknown dataset": edit(lambda h5: h5.create_dataset("x", data=np.ones(3))),
    "deleted dataset": edit(lambda h5: h5.__delitem__("v")),
    "other shape": edit(reshape),
    "a bit of the weights": flip_in("weights", 0.3),
    "the first bit of m": flip_in("m", 0.0),
    "a bit of v": flip_in("v", 0.999),
    "a bit outside": flip_outside,
    "swapped": swap,
    "of an earlier save": take_old,
}
KNOWN = ("attention.", "embedding.", "mlp.", "norm")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@ranks
def test_damage_is_refused_by_all(
    comm: Any, recipe: Recipe, run: Path, damage: Callable[[Path], None]
) -> None:
    folder = run / "checkpoints" / NEWEST
    if comm.rank == 0:
        damage(folder)
    comm.Barrier()
    text = refusal(comm, recipe, run)
    assert "shard_0000" in text and any(part in text for part in KNOWN), text
    # What to do about it
    assert text.count(f"{run / 'checkpoints' / 'step_00000002'} is complete") == 1
    assert f"once {folder} is moved away" in text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("a bit of the weights", "dataset weights is damaged"),
        ("the first bit of m", "dataset m is damaged"),
        ("a bit of v", "dataset v is damaged"),
        ("deleted", "No such file"),
        ("cut", "bytes instead of"),
    ],
)
@ranks
def test_the_kind_of_damage_is_said(
    comm: Any, recipe: Recipe, run: Path, damage: str, said: str
) -> None:
    if comm.rank == 0:
        DAMAGES[damage](run / "checkpoints" / NEWEST)
    comm.Barrier()
    text = refusal(comm, recipe, run)
    assert said in text and str(shard(run / "checkpoints" / NEWEST)) in text


@ranks
def test_a_structure_that_differs_is_told_by_its_names(
    comm: Any, recipe: Recipe, run: Path
) -> None:
    """Where sizes are told to fit: what a stranger would do."""
    folder = run / "checkpoints" / NEWEST
    if comm.rank == 0:
        DAMAGES["renamed dataset"](folder)
        size = shard(folder).stat().st_size
        tamper(folder, lambda body: body["shards"][1].update(bytes=size))
    comm.Barrier()
    text = refusal(comm, recipe, run)
    assert "dataset m is missing" in text and "'n' is unknown" in text


def say_nothing(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def flip_manifest(folder: Path) -> None:
    flip(folder / "manifest.json", 300)


def ask_for_more(folder: Path) -> None:
    """A model of another size, whose numbers are not there."""
    tamper(folder, lambda b: b["arrays"].update({"blocks.0.norm1.gain": [64]}))


@pytest.mark.parametrize("damage", [say_nothing, flip_manifest, ask_for_more])
@ranks
def test_a_damaged_manifest_is_refused_by_all(
    comm: Any, recipe: Recipe, run: Path, damage: Callable[[Path], None]
) -> None:
    folder = run / "checkpoints" / NEWEST
    if comm.rank == 0:
        damage(folder)
    comm.Barrier()
    text = refusal(comm, recipe, run)
    assert str(folder / "manifest.json") in text
    assert "step_00000002 is complete" in text
    # Named by its folder as well
    assert str(folder / "manifest.json") in refusal(comm, recipe, run, str(folder))


@pytest.mark.parametrize(
    "text",
    ["[[[", "model = 3", "[model]\na=" + "[" * 2000],
    ids=["no TOML", "no table", "deep"],
)
@ranks
def test_a_recipe_that_is_none_is_refused_by_all(
    comm: Any, recipe: Recipe, run: Path, text: str
) -> None:
    """Of a manifest whose checksum is right: from a stranger."""
    folder = run / "checkpoints" / NEWEST
    if comm.rank == 0:
        tamper(folder, lambda body: body.update(recipe=text))
    comm.Barrier()
    assert NEWEST in refusal(comm, recipe, run)


@ranks
def test_only_a_complete_one_is_offered(comm: Any, recipe: Recipe, run: Path) -> None:
    if comm.rank == 0:
        for folder in checkpoints(run):
            cut(folder)
    comm.Barrier()
    text = refusal(comm, recipe, run)
    assert "is complete" not in text and "shard_00001.h5" in text


@ranks
def test_what_is_offered_works(comm: Any, recipe: Recipe, run: Path) -> None:
    folder = run / "checkpoints" / NEWEST
    if comm.rank == 0:
        cut(folder)
    comm.Barrier()
    assert "step_00000002 is complete" in refusal(comm, recipe, run)
    comm.Barrier()
    if comm.rank == 0:
        folder.rename(run / "broken")
        shutil.copytree(_made["run"], run.with_name("whole"))
    comm.Barrier()
    # The same numbers as from a checkpoint that was never damaged
    found = []
    for folder in (run, run.with_name("whole")):
        assert go_on(comm, recipe, folder) == 0
        found.append(read_manifest(checkpoints(folder)[-1]))
    assert found[0].progress == found[1].progress and found[0].progress.step == 6
    sums = [[shard.blocks for shard in manifest.shards] for manifest in found]
    assert sums[0] == sums[1]


def restored(engine: Engine, folder: Path) -> list[np.ndarray]:
    """All that a rank has after a restart."""
    engine.restore(folder, read_manifest(folder))
    return [
        array.copy()
        for f in engine.fragments()
        for _, array in sorted(f.arrays.items())
    ]


@ranks
def test_what_shows_the_numbers_is_not_what_is_loaded(
    comm: Any, recipe: Recipe, run: Path
) -> None:
    """model.h5 of another checkpoint, or none at all, does not reach the weights."""
    folder = run / "checkpoints" / NEWEST
    other = folder.with_name("step_00000002")
    with layout_engine(recipe, comm) as engine:
        exact = restored(engine, folder)
        comm.Barrier()
        if comm.rank == 0:
            shutil.copy(other / "model.h5", folder / "model.h5")
            (folder / "optimizer.h5").unlink()
        comm.Barrier()
        restored(engine, other)
        found = restored(engine, folder)
        assert all(np.array_equal(*pair) for pair in zip(found, exact, strict=True))
