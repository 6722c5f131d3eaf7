"""Weights of a run: checkpoints/step_00000100/model.h5, one dataset per parameter.

A parameter blocks.3.attention.q.weight is the dataset blocks/3/attention/q/weight,
whole, whatever the layout was. The folder is written under a temporary name, flushed to
disk and renamed, then `latest` is moved: a checkpoint that has its name is complete.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpipar.checkpoint.gather import global_arrays
from mpipar.checkpoint.patient_file import PatientFile
from mpipar.comm import raise_together
from mpipar.errors import CheckpointError, ConfigError
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops

MODEL = "model.h5"
HEADER = {"creator": "mpipar", "format": 1}


def save_weights(
    run: Path,
    step: int,
    recipe: str,
    units: Iterable[Sequence[Parameter]],
    grid: Any,
    ops: Ops,
) -> Path:
    """Saves all weights as they are after `step` updates; returns the folder.

    recipe   the resolved recipe's text, stored with the weights
    units    groups of parameters, whose values are there while they are iterated over
    Raises   CheckpointError on all ranks together where rank 0 cannot write
    """
    final = run / "checkpoints" / f"step_{step:08d}"
    writer = _Writer(final) if grid.world.rank == 0 else None
    if writer is not None:
        writer.open({"step": step, "recipe": recipe})
    for parameters in units:
        arrays = global_arrays(
            parameters, lambda p: ops.to_host(p.data), grid, ops.dtype
        )
        for name, array in arrays:
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
        self._disk: PatientFile | None = None

    def open(self, attributes: dict[str, Any]) -> None:
        """Begins the file, in place of what a dead run may have left."""
        with self._noting_errors():
            shutil.rmtree(self.draft, ignore_errors=True)
            self.draft.mkdir(parents=True)
            self._disk = PatientFile(self.draft / MODEL)
            self._file = h5py.File(self._disk, "w")
            for key, value in (HEADER | attributes).items():
                self._file.attrs[key] = value

    def put(self, name: str, array: np.ndarray) -> None:
        """Writes one array."""
        if self.error is None:
            with self._noting_errors():
                self._file[name.replace(".", "/")] = array
                self._disk.check()

    def commit(self) -> None:
        """Makes the draft durable, gives it its name, then moves `latest`."""
        if self._file is not None:
            with self._noting_errors():
                self._file.close()
                self._disk.close()
        if self.error is not None:
            shutil.rmtree(self.draft, ignore_errors=True)
            return
        with self._noting_errors():
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
            if self.error is None:
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
            name = pointer.read_text(encoding="utf-8", errors="replace").strip()
            if re.fullmatch(r"step_\d+", name) and (folder / name / MODEL).is_file():
                return folder / name / MODEL
            raise CheckpointError(f"{pointer} names {name[:80]!r}, no checkpoint here")
    error = CheckpointError(
        f"{path} is no checkpoint: expected {MODEL}, or a run folder with "
        "checkpoints/latest"
    )
    # The command names the wrong place; nothing is damaged.
    error.exit_code = ConfigError.exit_code
    raise error


def read_recipe_text(file: Path) -> str:
    """The recipe stored with the weights.

    Raises CheckpointError where the file cannot be read or is not one of ours.
    """
    with _reading(file) as h5:
        for key, value in HEADER.items():
            if not np.array_equal(h5.attrs.get(key), value):
                raise CheckpointError(f"{file} is not a checkpoint of this version")
        recipe = h5.attrs.get("recipe")
        if not isinstance(recipe, str):
            raise CheckpointError(f"{file} holds no recipe")
        return recipe


def load_weights(file: Path, parameters: Sequence[Parameter], ops: Ops) -> None:
    """Fills every parameter with this rank's box of the saved array.

    Raises CheckpointError that names each parameter that is missing, has another shape
    or cannot be read.
    """
    with _reading(file) as h5:
        problems = [_load(h5, p, ops) for p in parameters]
    problems = [problem for problem in problems if problem]
    if problems:
        raise CheckpointError(f"{file}: " + "; ".join(problems))


def _load(h5: h5py.File, p: Parameter, ops: Ops) -> str | None:
    """Fills one parameter; what was wrong, if anything."""
    saved = h5.get(p.name.replace(".", "/"))
    if not isinstance(saved, h5py.Dataset):
        return f"{p.name} is missing"
    if saved.shape != p.shape:
        return f"{p.name} has shape {saved.shape}, expected {p.shape}"
    if saved.dtype.kind != "f":
        return f"{p.name} has type {saved.dtype}, expected a floating-point one"
    try:
        part = saved[tuple(slice(lo, hi) for lo, hi in p.box)]
        ops.store(ops.asarray(part).astype(ops.dtype, copy=False), p.data)
    except OSError as problem:
        return f"{p.name} cannot be read: {problem}"
    return None


@contextmanager
def _reading(file: Path) -> Iterator[h5py.File]:
    """The file, open for reading; locks are not needed for that."""
    try:
        h5 = h5py.File(file, "r", locking=False)
    except OSError as problem:
        raise CheckpointError(f"cannot read {file}: {problem}") from problem
    with h5:
        yield h5
