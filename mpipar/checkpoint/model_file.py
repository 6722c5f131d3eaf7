"""Weights of a run: checkpoints/step_00000100/model.h5, one dataset per parameter.

A parameter blocks.3.attention.q.weight is the dataset blocks/3/attention/q/weight, whole,
whatever the layout was. The folder is written under a temporary name, flushed to disk and
renamed, then `latest` is moved: a checkpoint that has its name is complete.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py

from mpipar.checkpoint.gather import global_arrays
from mpipar.comm import raise_together
from mpipar.errors import CheckpointError
from mpipar.layers.parameter import Parameter
from mpipar.ops import Ops

FORMAT = 1
MODEL = "model.h5"


def save_weights(
    run: Path, step: int, recipe: str, parameters: Sequence[Parameter], grid: Any, ops: Ops
) -> Path:
    """Saves all weights as they are after `step` updates; returns the folder.

    recipe   the resolved recipe's text, stored with the weights
    Raises   CheckpointError on all ranks together where rank 0 cannot write
    """
    final = run / "checkpoints" / f"step_{step:08d}"
    draft = final.with_name(final.name + ".tmp")
    error: Exception | None = None
    file: h5py.File | None = None
    if grid.world.rank == 0:
        try:
            file = _open_draft(draft, step, recipe)
        except OSError as problem:
            error = problem
    for name, array in global_arrays(parameters, lambda p: ops.to_host(p.data), grid):
        # After an error the others still send: take their arrays, write nothing.
        if file is not None and error is None:
            try:
                file[name.replace(".", "/")] = array
            except OSError as problem:
                error = problem
    if grid.world.rank == 0 and error is None:
        try:
            file.close()
            _commit(draft, final)
        except OSError as problem:
            error = problem
    if error is not None:
        error = CheckpointError(f"cannot save {final}: {error}")
    raise_together(error, grid.world)
    return final


def _open_draft(draft: Path, step: int, recipe: str) -> h5py.File:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    file = h5py.File(draft / MODEL, "w")
    file.attrs["creator"] = "mpipar"
    file.attrs["format"] = FORMAT
    file.attrs["step"] = step
    file.attrs["recipe"] = recipe
    return file


def _commit(draft: Path, final: Path) -> None:
    """Makes the draft durable and gives it its name, then moves `latest`."""
    _flush(draft / MODEL)
    _flush(draft)
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    _flush(final.parent)
    pointer = final.with_name("latest.tmp")
    pointer.write_text(final.name + "\n")
    _flush(pointer)
    pointer.replace(final.with_name("latest"))
    _flush(final.parent)


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
            if h5.attrs.get("creator") != "mpipar" or h5.attrs.get("format") != FORMAT:
                raise CheckpointError(f"{file} is not a checkpoint of format {FORMAT}")
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
