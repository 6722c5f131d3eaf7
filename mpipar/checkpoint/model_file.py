"""Weights of a run: checkpoints/step_00000100/model.h5, one dataset per parameter.

A parameter blocks.3.attention.q.weight is the dataset blocks/3/attention/q/weight,
whole, whatever the layout was. The folder is written under a temporary name, flushed to
disk and renamed, then `latest` is moved: a checkpoint that has its name is complete.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpipar.checkpoint.gather import global_arrays
from mpipar.comm import raise_together
from mpipar.errors import CheckpointError
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops

MODEL = "model.h5"
HEADER = {"creator": "mpipar", "format": 1}


def save_weights(
    run: Path,
    step: int,
    recipe: str,
    parameters: Sequence[Parameter],
    grid: Any,
    ops: Ops,
) -> Path:
    """Saves all weights as they are after `step` updates; returns the folder.

    recipe   the resolved recipe's text, stored with the weights
    Raises   CheckpointError on all ranks together where rank 0 cannot write
    """
    final = run / "checkpoints" / f"step_{step:08d}"
    writer = _Writer(final) if grid.world.rank == 0 else None
    if writer is not None:
        writer.open({"step": step, "recipe": recipe})
    for name, array in global_arrays(parameters, lambda p: ops.to_host(p.data), grid):
        if writer is not None:
            writer.put(name, array)
    if writer is not None:
        writer.commit()
    raise_together(writer and writer.error, grid.world)
    return final


class _Writer:
    """Writes a checkpoint under a temporary name, then gives it its own.

    After the first error nothing more is written: it is kept in `error`, so that rank 0
    goes on taking the arrays that the other ranks send, and all of them hear of it.
    """

    def __init__(self, final: Path) -> None:
        self.final, self.draft = final, final.with_name(final.name + ".tmp")
        self.error: CheckpointError | None = None
        self._file: h5py.File | None = None

    def open(self, attributes: dict[str, Any]) -> None:
        """Begins the file, in place of what a dead run may have left."""
        with self._noting_errors():
            shutil.rmtree(self.draft, ignore_errors=True)
            self.draft.mkdir(parents=True)
            self._file = h5py.File(self.draft / MODEL, "w")
            for key, value in (HEADER | attributes).items():
                self._file.attrs[key] = value

    def put(self, name: str, array: np.ndarray) -> None:
        """Writes one array."""
        if self.error is None:
            with self._noting_errors():
                self._file[name.replace(".", "/")] = array

    def commit(self) -> None:
        """Makes the draft durable, gives it its name, then moves `latest`."""
        if self._file is not None:
            with self._noting_errors():
                self._file.close()
        if self.error is not None:
            shutil.rmtree(self.draft, ignore_errors=True)
            return
        with self._noting_errors():
            _flush(self.draft / MODEL)
            _flush(self.draft)
            self.draft.rename(self.final)
            _flush(self.final.parent)
            pointer = self.final.with_name("latest.tmp")
            pointer.write_text(self.final.name + "\n", encoding="utf-8")
            _flush(pointer)
            pointer.replace(self.final.with_name("latest"))
            _flush(self.final.parent)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as problem:
            self.error = CheckpointError(f"cannot save {self.final}: {problem}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(path: Path) -> Path:
    """The model file meant by a checkpoint folder, a run folder or the file itself.

    Raises CheckpointError that says what is missing.
    """
    if path.is_file():
        return path
    if (path / MODEL).is_file():
        return path / MODEL
    for folder in (path, path / "checkpoints"):
        pointer = folder / "latest"
        if pointer.is_file():
            found = folder / pointer.read_text().strip() / MODEL
            if found.is_file():
                return found
            raise CheckpointError(f"{pointer} names {found}, which does not exist")
    raise CheckpointError(
        f"{path} is no checkpoint: expected {MODEL}, or a run folder with "
        "checkpoints/latest"
    )


def read_recipe_text(file: Path) -> str:
    """The recipe stored with the weights.

    Raises CheckpointError where the file was not written by mpipar.
    """
    try:
        with h5py.File(file, "r", locking=False) as h5:
            if any(h5.attrs.get(key) != value for key, value in HEADER.items()):
                raise CheckpointError(f"{file} is not a checkpoint of this version")
            return str(h5.attrs["recipe"])
    except OSError as problem:
        raise CheckpointError(f"cannot read {file}: {problem}") from problem


def load_weights(file: Path, parameters: Sequence[Parameter], ops: Ops) -> None:
    """Fills every parameter with this rank's box of the saved array.

    Raises CheckpointError that names each parameter that is missing or has another
    shape.
    """
    problems = []
    with h5py.File(file, "r", locking=False) as h5:
        for p in parameters:
            key = p.name.replace(".", "/")
            saved = h5.get(key)
            if not isinstance(saved, h5py.Dataset):
                problems.append(f"{p.name} is missing")
            elif saved.shape != p.shape:
                problems.append(f"{p.name} has shape {saved.shape}, expected {p.shape}")
            else:
                region = tuple(slice(lo, hi) for lo, hi in p.box)
                p.data[...] = ops.asarray(saved[region])
    if problems:
        raise CheckpointError(f"{file}: " + "; ".join(problems))
