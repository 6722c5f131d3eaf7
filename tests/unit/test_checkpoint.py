"""Checkpoints of one rank: what is found, what is refused, what a dead run left."""

import pickle
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from saved import (
    KINDS,
    OPS,
    SHAPES,
    facts_of,
    is_of,
    make_state,
    names,
    numbers,
    save,
)

from mpipar.checkpoint import (
    Fragment,
    checkpoints,
    find_checkpoint,
    fragments_of,
    is_complete,
    load,
    read_manifest,
    remove_drafts,
    whole_fragments,
)
from mpipar.errors import CheckpointError
from mpipar.layers.parameter import Parameter
from mpipar.zero.flat import FlatState, Piece, Unit

FILES = ["manifest.json", "model.h5", "optimizer.h5", "shard_00000.h5"]


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    saved = save(tmp_path, 12)
    assert saved.folder == tmp_path / "checkpoints" / "step_00000012"
    assert saved.error is None and saved.note == ""
    assert names(saved.folder) == FILES and is_of(saved.folder, 0)
    sizes = [(saved.folder / name).stat().st_size for name in FILES]
    assert saved.bytes == sum(sizes)
    assert (saved.folder.parent / "latest").read_text() == "step_00000012\n"


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 12).folder

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(np, "load", refuse)
    assert is_of(find_checkpoint(tmp_path), 0) and is_complete(folder)


def test_a_manifest_says_what_the_run_was(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path, 12).folder)
    facts = facts_of(12)
    assert (manifest.run, manifest.recipe, manifest.layout) == (
        facts.run, facts.recipe, facts.layout
    )  # fmt: skip
    assert manifest.progress == facts.progress and manifest.kinds == [*KINDS]
    # In the order of the model's names, numbers as numbers
    assert dict(manifest.arrays) == SHAPES and manifest.dtype == "float64"
    assert manifest.bytes == save(tmp_path, 13).bytes - len(
        (tmp_path / "checkpoints" / "step_00000013" / "manifest.json").read_bytes()
    )


def test_any_hdf5_tool_reads_whole_arrays(tmp_path: Path) -> None:
    """Also from another place: the files name each other by their names alone."""
    folder = tmp_path / "moved"
    save(tmp_path, 12).folder.rename(folder)
    exact = numbers(make_state(0))
    for kind in KINDS:
        file, group = ("model.h5", "") if kind == "weights" else ("optimizer.h5", kind)
        with h5py.File(folder / file) as h5:
            assert h5.attrs["step"] == 12 and h5.attrs["recipe"] == "recipe of step 12"
            for name, shape in SHAPES.items():
                found = h5[f"{group}/{name.replace('.', '/')}"]
                assert found.shape == shape and found.dtype == np.float64
                assert np.array_equal(found[()].ravel(), exact[f"{kind} {name}"])


def test_any_way_to_name_a_checkpoint_finds_it(tmp_path: Path) -> None:
    first, last = save(tmp_path, 5).folder, save(tmp_path, 10).folder
    for path in (tmp_path, tmp_path / "checkpoints", last):
        assert find_checkpoint(path) == last
    for name in FILES:
        assert find_checkpoint(first / name) == first
    assert find_checkpoint(first) == first
    assert checkpoints(tmp_path) == [first, last]


def test_a_number_of_steps_of_any_length_has_its_place(tmp_path: Path) -> None:
    steps = [99_999_999, 100_000_000, 2]
    found = {step: save(tmp_path, step).folder for step in steps}
    assert checkpoints(tmp_path) == [found[step] for step in sorted(steps)]


def leave_drafts(run: Path) -> None:
    """What runs that died at different moments have left."""
    folder = run / "checkpoints"
    for name in ("step_00000002.4f1d.tmp", "step_00000001.old.tmp"):
        draft = folder / name
        shutil.copytree(folder / "step_00000001", draft)
        (draft / "shard_00000.h5").write_bytes(b"half of a file")
    (folder / "latest.tmp").write_text("step_00000009")


def test_what_a_dead_run_left_is_ignored_and_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    mine = tmp_path / "checkpoints" / "step_00000003.notes"
    mine.mkdir()
    leave_drafts(tmp_path)
    saved = save(tmp_path, 2, seed=2)
    assert find_checkpoint(tmp_path) == saved.folder and is_of(saved.folder, 2)
    assert names(saved.folder) == FILES
    (mine.parent / "latest.tmp").write_text("step_00000009")
    remove_drafts(tmp_path)
    assert names(mine.parent) == [
        "latest", "step_00000001", "step_00000002", "step_00000003.notes"
    ]  # fmt: skip


def test_to_remove_drafts_needs_no_run(tmp_path: Path) -> None:
    remove_drafts(tmp_path)
    remove_drafts(tmp_path / "none")
    assert names(tmp_path) == []


def test_a_draft_is_never_found(tmp_path: Path) -> None:
    """Not even one that is whole: it may not be on disk."""
    whole = save(tmp_path, 2).folder
    whole.rename(whole.with_name("step_00000002.4f1d.tmp"))
    assert checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("said", ["step_00000009", "", "\0", "é" * 400])
def test_what_latest_says_does_not_matter(tmp_path: Path, said: str) -> None:
    """It is for people: a run that dies between two renames leaves an old one."""
    folder = save(tmp_path, 1).folder
    (folder.parent / "latest").write_text(said, encoding="latin-1")
    assert find_checkpoint(tmp_path) == folder


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "checkpoints" / "step_00000001"
    old.mkdir(parents=True)
    (old / "model.h5").write_bytes(b"of an earlier version")
    for path in (tmp_path, tmp_path / "none", old, old / "model.h5"):
        with pytest.raises(CheckpointError, match="manifest.json") as caught:
            find_checkpoint(path)
        assert caught.value.exit_code == 2 and str(path) in str(caught.value)
    assert "complete" in str(caught.value)


@pytest.mark.parametrize("name", ["shard_00000.h5", "manifest.json"])
def test_what_is_not_whole_is_not_complete(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1).folder
    assert is_complete(folder)
    data = (folder / name).read_bytes()
    for wrong in (data[:-1], data + b"\0", None):
        (folder / name).unlink() if wrong is None else (folder / name).write_bytes(
            wrong
        )
        assert not is_complete(folder)
    assert not is_complete(folder / "none")


def make_fragment(name: str, *shape: int) -> Fragment:
    size = int(np.prod(shape))
    box = tuple((0, n) for n in shape)
    return Fragment(name, shape, box, 0, size, {"weights": np.zeros(size)})


def test_each_missing_or_misshapen_array_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    wanted = [
        make_fragment("embedding.token.weight", 4, 7),
        make_fragment("blocks.0.mlp.up.weight", 6, 4),
        make_fragment("blocks.1.mlp.up.weight", 6, 4),
        make_fragment("blocks.0.norm1.gain", 4, 1),
    ]
    with pytest.raises(CheckpointError) as caught:
        load(folder, read_manifest(folder), wanted, OPS)
    text = str(caught.value)
    assert "embedding.token.weight has shape (7, 4), expected (4, 7)" in text
    assert "blocks.0.norm1.gain has shape (4,), expected (4, 1)" in text
    assert "blocks.1.mlp.up.weight is missing" in text and "0.mlp" not in text


def test_a_kind_that_was_not_saved_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    wanted = make_fragment("blocks.0.norm1.gain", 4)
    wanted.arrays["previous"] = np.zeros(4)
    with pytest.raises(CheckpointError, match="no previous, only weights, m, v"):
        load(folder, read_manifest(folder), [wanted], OPS)
    # Unless it is said which one is meant.
    kinds = {"weights": "weights", "previous": "weights"}
    load(folder, read_manifest(folder), [wanted], OPS, kinds)
    assert np.array_equal(wanted.arrays["previous"], wanted.arrays["weights"])
    assert wanted.arrays["weights"].any()


def test_every_part_of_an_array_can_be_read_alone(tmp_path: Path) -> None:
    """Any stretch of any box, as ranks of another layout want them."""
    folder = save(tmp_path, 1).folder
    manifest, name = read_manifest(folder), "embedding.token.weight"
    whole = numbers(make_state(0))[f"m {name}"].reshape(7, 4)
    for box in (((0, 7), (0, 4)), ((2, 5), (0, 4)), ((0, 7), (1, 3)), ((3, 6), (2, 4))):
        exact = whole[tuple(slice(*interval) for interval in box)].ravel()
        for begin in range(exact.size):
            for end in (begin + 1, (begin + exact.size) // 2 + 1, exact.size):
                arrays = {"m": np.full(end - begin, np.nan)}
                part = Fragment(name, (7, 4), box, begin, end, arrays)
                load(folder, manifest, [part], OPS)
                assert np.array_equal(arrays["m"], exact[begin:end])


def make_parameters() -> list[Parameter]:
    boxes = {name: tuple((0, n) for n in shape) for name, shape in SHAPES.items()}
    return [Parameter(n, SHAPES[n], box, "zeros") for n, box in boxes.items()]


def test_parameters_are_filled_where_they_are(tmp_path: Path) -> None:
    folder = save(tmp_path, 1).folder
    flat = FlatState([make_parameters()], OPS)
    load(folder, read_manifest(folder), whole_fragments(flat.parameters), OPS)
    exact = numbers(make_state(0))
    for p in flat.parameters:
        assert np.array_equal(p.data.ravel(), exact[f"weights {p.name}"])


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 60, 70])
def test_ranks_with_the_same_pieces_share_them(parts: int) -> None:
    """Each element is saved once, padding never; shares differ by one at most."""
    unit = Unit(make_parameters(), 0, 16)
    data = np.arange(float(unit.size))
    found: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
    sizes = []
    for part in range(parts):
        piece = Piece(unit, 0, unit.size, data, data, part, parts)
        own = list(fragments_of([piece], {"weights": [data]}, share=True))
        sizes.append(sum(f.size for f in own))
        for f in own:
            assert (f.begin, f.end) == (sum(map(len, found[f.name])), f.end)
            found[f.name].append(f.arrays["weights"])
    together = np.concatenate([x for name in SHAPES for x in found[name]])
    assert np.array_equal(together, data[: unit.filled])
    assert unit.filled < unit.size and max(sizes) <= -(-unit.size // parts)
