"""Where a run begins: at its first step, or where a checkpoint ends."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpipar.checkpoint import (
    MANIFEST,
    Manifest,
    Progress,
    checkpoints,
    find_checkpoint,
    is_complete,
    read_manifest,
    step_of,
)
from mpipar.comm import file_work
from mpipar.config import Recipe, toml_value
from mpipar.errors import CheckpointError, ConfigError, MpiparError

AUTO = "auto"
# Where a run folder has this, it holds a run
RECIPE = "recipe.toml"
# What a model computes with the same weights
_MODEL = {
    "model": (
        "family", "layers", "width", "heads", "kv_heads", "ffn", "vocab", "tied",
        "activation", "rope_theta", "window", "norm_eps",
    ),
    "experts": (
        "count", "active", "ffn", "shared", "dense_blocks", "router", "groups",
        "active_groups", "scale",
    ),
}  # fmt: skip
# What may change without a word: it does not change what is computed
_FREE = (
    "parallel.", "log.", "checkpoint.", "train.micro_batch", "train.recompute",
    "train.device", "train.attention", "train.graph", "train.max_hours", "train.eval_",
    "train.check_every", "train.recover", "data.workers",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Where a run begins; `folder` and `manifest` are None at the first step.

    notes   what a person should know
    """

    folder: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.manifest.progress if self.manifest else Progress(step=0)


def find_start(
    resume: str, out: Path, recipe: Recipe, world: Any, *, again: bool = False
) -> Start:
    """The checkpoint that `resume` means, read by rank 0. Collective.

    resume   "" = none: `out` must not hold a run; "auto" = the newest one in `out`, if
             there is one; else the path of a checkpoint or a run
    again    this run has begun that way already: it goes on in `out`
    Raises   ConfigError, where the checkpoint is of another model than the recipe, or
             CheckpointError; on all ranks together
    """
    found: Start | MpiparError = Start()
    if world.rank == 0:
        try:
            with file_work("looking into", out):
                found = _checked(_find(resume, out, again), recipe)
        except MpiparError as error:
            found = error
        except OSError as error:
            found = CheckpointError(f"cannot look into {out}: {error}")
    found = world.broadcast_obj(found)
    if isinstance(found, MpiparError):
        found.agreed = True
        raise found
    return found


def _find(resume: str, out: Path, again: bool) -> Start:
    holds_run = (out / RECIPE).exists() or bool(checkpoints(out))
    if again:
        resume, holds_run = AUTO if checkpoints(out) else resume, False
    if not resume and holds_run:
        raise _wrong(
            f"{out} already holds a run; --resume auto goes on with it, "
            "or choose another --out"
        )
    if not resume:
        return Start()
    there = checkpoints(out)
    if resume == AUTO:
        return _read(there[-1], out) if there else Start()
    folder = find_checkpoint(Path(resume))
    if any(folder.samefile(path) for path in there):
        newest = there[-1]
        if not folder.samefile(newest):
            raise _wrong(
                f"{newest} is newer than --resume {resume}; choose another --out, or "
                f"remove what is newer"
            )
    elif holds_run:
        raise _wrong(
            f"{out} already holds another run than --resume {resume}; --resume auto "
            "goes on with that, or choose another --out"
        )
    return _read(folder, out)


def _read(folder: Path, out: Path) -> Start:
    try:
        manifest = read_manifest(folder)
        if step_of(folder) not in (None, manifest.progress.step):
            raise CheckpointError(f"{folder} has another name than when it was saved")
        return Start(folder, manifest)
    except CheckpointError as error:
        raise with_offer(error, folder, out) from None


def _wrong(reason: str) -> ConfigError:
    return ConfigError([reason], title="the command")


def with_offer(error: CheckpointError, folder: Path, out: Path) -> CheckpointError:
    """The error of a checkpoint that cannot be used, with an older one that can."""
    there = checkpoints(folder.absolute().parent.parent)
    steps = [step_of(path) for path in there]
    own = step_of(folder.absolute())
    older = there[: steps.index(own)] if own in steps else []
    for path in reversed(older):
        if not is_complete(path):
            continue
        way = f"--resume {path} goes on from there"
        if any(path.samefile(mine) for mine in checkpoints(out)):
            way = f"--resume auto goes on from there once {folder} is moved away"
        error.args = (f"{error}\n  {path} is complete: {way}",)
        break
    return error


def _checked(start: Start, recipe: Recipe) -> Start:
    """The start, with a note on what the recipe changes.

    Raises   ConfigError that names all keys that another model would have
    """
    if start.manifest is None:
        return start
    before = _sections(start)
    fixed = [f"{section}.{key}" for section, keys in _MODEL.items() for key in keys]
    if recipe.model.family == "gpt":
        fixed.append("model.context")
    changed = _changes(before, recipe)
    rate = "experts.bias_rate"
    if toml_value(0.0) in changed.get(rate, ()):
        # There is a bias, or there is none
        fixed.append(rate)
    wrong = [
        f"{key} = {new} must be {old}, as in {start.folder}"
        for key, (old, new) in changed.items()
        if key in fixed
    ]
    if wrong:
        raise ConfigError(wrong)
    parts = [
        f"{key} {old} → {new}"
        for key, (old, new) in changed.items()
        if not key.startswith(_FREE)
    ]
    if not parts:
        return start
    return replace(start, notes=(f"note: changed since then: {', '.join(parts)}",))


def _sections(start: Start) -> dict[str, Any]:
    """The recipe of the run that was saved. Raises CheckpointError."""
    try:
        table = tomllib.loads(start.manifest.recipe)
    except (ValueError, RecursionError) as problem:
        reason = f"{start.folder / MANIFEST} holds no recipe: {problem}"
        raise CheckpointError(reason) from None
    if not all(isinstance(section, dict) for section in table.values()):
        raise CheckpointError(f"{start.folder / MANIFEST} holds no recipe")
    return table


def _changes(before: dict[str, Any], recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Old and new value of each key that both have, as TOML."""
    found = {}
    for section, fields in recipe.model_dump().items():
        for key, new in fields.items():
            old = before.get(section, {}).get(key, new)
            if toml_value(old) != toml_value(new):
                found[f"{section}.{key}"] = toml_value(old), toml_value(new)
    return found
