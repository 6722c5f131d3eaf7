"""The folder of a run's checkpoints: their names, and when one exists.

runs/first/checkpoints/
    step_00000100/            exists if and only if it is complete and on disk
        manifest.json  model.h5  optimizer.h5  shard_00000.h5  shard_00001.h5 …
    step_00000200.4f1d.tmp/   being written, or left by a run that died
    latest                    the name of the newest one, for people and scripts

A save writes everything into a draft, flushes it to disk, and only then gives it its
name; an old one loses its name before it is removed. So whatever is killed, whenever,
what has a name is whole, and drafts of two runs never mix.
"""

import os
import re
import shutil
from pathlib import Path

from mpipar.checkpoint.files import flush, replace_text
from mpipar.checkpoint.manifest import MANIFEST, read_manifest
from mpipar.comm import file_work
from mpipar.errors import CheckpointError, ConfigError

FOLDER, LATEST = "checkpoints", "latest"
_NAME = re.compile(r"step_(\d{8,})")
_DRAFT = re.compile(r"step_\d{8,}\.[a-z0-9]+\.tmp")


def step_name(step: int) -> str:
    """Name of the checkpoint after so many steps."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name; None where that is none."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    try:
        with file_work("listing", run / FOLDER):
            there = list((run / FOLDER).iterdir())
            there = [path for path in there if (path / MANIFEST).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {step_of(path): path for path in there}
    return [found[step] for step in sorted(step for step in found if step is not None)]


def is_complete(folder: Path) -> bool:
    """True where the manifest is sound and all files have their sizes."""
    try:
        files = read_manifest(folder).files
        return all((folder / n).stat().st_size == size for n, size in files.items())
    except (CheckpointError, OSError):
        return False


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by its folder, a file in it, a run or its checkpoints: the
    newest one of those.

    Raises   CheckpointError that says what is missing, with the exit status of a wrong
             command: nothing is damaged
    """
    here = path.parent if path.is_file() else path
    if (here / MANIFEST).is_file():
        return here
    is_inside = here.absolute().name == FOLDER
    above = here.parent if here.name == FOLDER else here / ".."
    for run in (here, above) if is_inside else (here,):
        if found := checkpoints(run):
            return found[-1]
    error = CheckpointError(
        f"{path} is no checkpoint: expected a folder with {MANIFEST}, or a run folder "
        f"with {FOLDER}/step_…"
    )
    if (path / "model.h5").is_file() or path.suffix == ".h5":
        error = CheckpointError(
            f"{path} has no {MANIFEST} beside it: it is not complete, or of mpipar "
            "before 0.3"
        )
    error.exit_code = ConfigError.exit_code
    raise error


def draft_of(run: Path, step: int, token: str) -> Path:
    """The folder in which the checkpoint of a step is written.

    token   small letters and digits, which no other run uses
    """
    return run / FOLDER / f"{step_name(step)}.{token}.tmp"


def commit(draft: Path, final: Path | None = None) -> Path:
    """Gives a draft that is complete its name.

    Everything in the draft must be on disk. Raises OSError, and CheckpointError where
    there is something of that name already.

    final    beside the draft; by default the draft's name up to its first dot
    """
    final = final or draft.with_name(draft.name.partition(".")[0])
    if os.path.lexists(final):
        raise CheckpointError(
            f"{final} is there already: another run writes to this folder"
        )
    flush(draft)
    with file_work("renaming", draft):
        draft.rename(final)
    flush(final.parent)
    return final


def point_to(folder: Path) -> None:
    """Lets `latest` name a checkpoint, if that is the newest one. Raises OSError."""
    if folder in checkpoints(folder.parent.parent)[-1:]:
        replace_text(folder.with_name(LATEST), folder.name + "\n")


def prune(run: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints; 0 keeps all. Raises OSError."""
    for old in checkpoints(run)[:-keep] if keep else []:
        nameless = old.with_name(f"{old.name}.old.tmp")
        with file_work("removing", old):
            old.rename(nameless)
            shutil.rmtree(nameless)


def remove_drafts(run: Path) -> None:
    """Removes what runs that died have left, as far as that is possible."""
    folder = run / FOLDER
    with file_work("removing drafts from", folder):
        for path in folder.iterdir() if folder.is_dir() else []:
            if _DRAFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        (folder / f"{LATEST}.tmp").unlink(missing_ok=True)
