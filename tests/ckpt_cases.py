"""Checkpoints made by hand, of several ranks, in one process."""

import sys
from math import prod
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpipar.checkpoint import Manifest, Progress, read_manifest
from mpipar.checkpoint.folder import draft_of, point_to
from mpipar.checkpoint.saver import conclude
from mpipar.checkpoint.shard import Layout, shard_name, write_shard
from mpipar.cli import entry

SHAPES = {"embedding.token.weight": (37, 8), "blocks.0.attention.q.weight": (12, 10),
          "blocks.0.norm1.gain": (11,), "blocks.10.cube": (4, 3, 6)}  # fmt: skip
KINDS = ["weights", "m", "v"]
Arrays = dict[str, dict[str, np.ndarray]]


def make_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """What runs a command and returns its exit status, output and complaints."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        status = entry.main(["ckpt", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def shrink_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that arrays have many."""
    for name in ("inspect", "manifest", "reshard", "shard"):
        module = sys.modules[f"mpipar.checkpoint.{name}"]
        monkeypatch.setattr(module, "BLOCK", 64)


def make_arrays(shapes=SHAPES, kinds=KINDS, dtype: str = "float32") -> Arrays:
    rng = np.random.default_rng(1)
    return {
        kind: {name: rng.normal(size=s).astype(dtype) for name, s in shapes.items()}
        for kind in kinds
    }


def cut(shape: tuple[int, ...], columns: int, parts: int):
    """(rank, box, begin, end): the last dim cut in columns, each of them in parts."""
    count = columns if len(shape) > 1 else 1
    for column in range(count):
        ends = tuple(shape[-1] * i // count for i in (column, column + 1))
        box = (*((0, size) for size in shape[:-1]), ends)
        size = prod(hi - lo for lo, hi in box)
        for part in range(parts):
            begin, end = (size * i // parts for i in (part, part + 1))
            if begin < end:
                yield column * parts + part, box, begin, end


def save(
    folder: Path,
    step: int,
    arrays: Arrays,
    columns=2,
    parts=2,
    dtype="float32",
    **facts,
) -> Path:
    """A checkpoint of columns · parts ranks, in a run folder."""
    shapes = {name: x.shape for name, x in arrays["weights"].items()}
    ranks: dict[int, list] = {}
    for name, shape in shapes.items():
        for rank, *region in cut(shape, columns, parts):
            ranks.setdefault(rank, []).append((name, *region))
    draft = draft_of(folder, step, "abc")
    draft.mkdir(parents=True)
    shards = []
    for rank, regions in ranks.items():
        numbers = (
            arrays[kind][name][tuple(slice(*pair) for pair in box)].ravel()[begin:end]
            for kind in arrays
            for name, box, begin, end in regions
        )
        layout = Layout(regions, list(arrays), dtype)
        shards.append(write_shard(draft / shard_name(rank), layout, numbers))
    said = {
        "format": 2, "creator": "mpipar", "run": "r1", "saved": "2026-11-30T00:00:00",
        "recipe": "[train]\n", "layout": f"tp {columns} x dp {parts}",
        "progress": Progress(step=step, updates=step, tokens=1234 * step),
        "dtype": dtype, "kinds": list(arrays), "arrays": shapes, "shards": shards,
        "views": {},
    }  # fmt: skip
    made = conclude(draft, Manifest(**{**said, **facts}))
    point_to(made)
    return made


def read(folder: Path) -> Arrays:
    """What a plain HDF5 reader sees."""
    found: Arrays = {"weights": {}}
    with h5py.File(folder / "model.h5") as file:
        for name in read_manifest(folder).arrays:
            found["weights"][name] = file[name.replace(".", "/")][:]
    if (folder / "optimizer.h5").exists():
        with h5py.File(folder / "optimizer.h5") as file:
            for kind in file:
                names = read_manifest(folder).arrays
                found[kind] = {n: file[kind][n.replace(".", "/")][:] for n in names}
    return found


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for kind, arrays in expected.items():
        for name, x in arrays.items():
            assert found[kind][name].dtype == x.dtype
            assert np.array_equal(found[kind][name], x), (kind, name)


def flip(file: Path, place: int, bits: int = 1) -> None:
    with file.open("r+b") as f:
        f.seek(place)
        byte = f.read(1)[0]
        f.seek(place)
        f.write(bytes([byte ^ bits]))
