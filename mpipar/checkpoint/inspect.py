"""Looks at checkpoints from outside: lists them, and reads every byte of one."""

import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from mpipar.checkpoint.boxes import Measure, boxes_of
from mpipar.checkpoint.folder import FOLDER, find_checkpoint, step_of
from mpipar.checkpoint.manifest import (
    BLOCK,
    MANIFEST,
    Manifest,
    Shard,
    View,
    blocks_of,
    read_manifest,
)
from mpipar.checkpoint.shard import ShardReader
from mpipar.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """A folder that is, or was to become, a checkpoint.

    step      0 where it is not known;  bytes  of the files that are there
    manifest  None where there is none that can be read
    problem   why it cannot be used; "" where names and sizes of all files are right
    """

    folder: Path
    step: int
    bytes: int
    manifest: Manifest | None = None
    problem: str = ""

    def as_dict(self, *, arrays: bool = False) -> dict[str, Any]:
        """For JSON; with the recipe and a list of the arrays if wanted."""
        facts = {
            "name": self.folder.name,
            "path": str(self.folder),
            "step": self.step,
            "bytes": self.bytes,
            "complete": not self.problem,
            "problem": self.problem,
        }
        m = self.manifest
        if m is None:
            return facts
        facts |= m.progress.model_dump() | {
            "run": m.run, "saved": m.saved, "layout": m.layout, "dtype": m.dtype,
            "kinds": m.kinds, "shards": len(m.shards),
        }  # fmt: skip
        if arrays:
            facts["recipe"] = m.recipe
            facts["arrays"] = [
                {"name": name, "shape": shape, "kinds": m.kinds, "dtype": m.dtype}
                for name, shape in m.arrays.items()
            ]
        return facts


def look(path: Path) -> Entry | list[Entry]:
    """What names and sizes say of a checkpoint, or of all those of a run, oldest first.

    path     folder of a checkpoint or a file in it; a run, or its checkpoints
    Raises   CheckpointError where there is nothing of the kind
    """
    try:
        here = path.parent if path.is_file() else path
        if (here / MANIFEST).is_file():
            return _entry(here)
        folder = here if here.name == FOLDER else here / FOLDER
        there = list(folder.iterdir()) if folder.is_dir() else []
        found = [_entry(p) for p in there if p.is_dir() and _may_be_one(p)]
    except OSError as problem:
        raise CheckpointError(f"cannot look into {path}: {problem}") from problem
    if not found:
        return _entry(find(path))
    return sorted(found, key=lambda entry: (entry.step, entry.folder.name))


def find(path: Path) -> Path:
    """`find_checkpoint`, with every failure as CheckpointError."""
    try:
        return find_checkpoint(path)
    except OSError as problem:
        raise CheckpointError(f"cannot look into {path}: {problem}") from problem


def _may_be_one(folder: Path) -> bool:
    return _step_in_name(folder) is not None or (folder / MANIFEST).is_file()


def _step_in_name(folder: Path) -> int | None:
    """Of a checkpoint or of its draft."""
    return step_of(Path(folder.name.partition(".")[0]))


def _entry(folder: Path) -> Entry:
    step, size, manifest = _step_in_name(folder) or 0, 0, None
    try:
        size = sum(file.lstat().st_size for file in folder.iterdir())
        if folder.name.endswith(".tmp"):
            problem = "incomplete: being written, or left by a run that died"
        elif not (folder / MANIFEST).is_file():
            problem = f"incomplete: {MANIFEST} is missing"
        else:
            manifest = read_manifest(folder)
            step, problem = manifest.progress.step, _wrong_files(folder, manifest)
    except (OSError, CheckpointError) as error:
        problem = f"damaged: {error}".replace(f"{folder}{os.sep}", "")
    return Entry(folder, step, size, manifest, problem)


def _wrong_files(folder: Path, manifest: Manifest) -> str:
    """The first few files that are missing or have another size."""
    wrong = []
    for name, size in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(found.st_mode):
            wrong.append(f"{name} is not a plain file")
        elif found.st_size != size:
            wrong.append(f"{name} has {found.st_size} bytes instead of {size}")
    if not wrong:
        return ""
    more = f" and {len(wrong) - 3} more files" if len(wrong) > 3 else ""
    return f"damaged: {'; '.join(wrong[:3])}{more}"


class Damage(NamedTuple):
    """Something that is not as it was saved.

    dataset      kind of numbers in a shard; "" where the damage is in none
    parameters   that it concerns
    """

    file: str
    dataset: str
    parameters: list[str]
    text: str


@dataclass(frozen=True)
class Verdict:
    """What reading all of a checkpoint has shown.

    strays   files in the folder that do not belong to it
    """

    folder: Path
    files: int = 1
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "folder": str(self.folder),
            "sound": not self.damages,
            "damages": [damage._asdict() for damage in self.damages],
        }


def verify(path: Path) -> Verdict:
    """Reads every byte of one checkpoint, a block at a time, and finds all damages.

    path     of a checkpoint, or of a run, whose newest one is meant
    Raises   CheckpointError where there is none
    """
    folder = find(path)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Verdict(folder, damages=[Damage(MANIFEST, "", [], str(error))])
    try:
        damages = list(_manifest_damages(folder, manifest))
        for shard in manifest.shards:
            damages += _shard_damages(folder, manifest, shard)
        for name, view in manifest.views.items():
            damages += _view_damages(folder / name, view, list(manifest.arrays))
        there = set(os.listdir(folder))
    except OSError as problem:
        raise CheckpointError(f"cannot read {folder}: {problem}") from problem
    files = {MANIFEST, *manifest.files}
    return Verdict(folder, len(files), manifest.bytes, damages, sorted(there - files))


def _manifest_damages(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """What `read_manifest` does not see."""
    for name in uncovered(manifest):
        text = f"the regions of {name} do not have each of its elements once"
        text = f"{folder / MANIFEST}: {text}"
        yield Damage(MANIFEST, "", [name], text)


def uncovered(manifest: Manifest) -> list[str]:
    """Arrays whose regions miss an element, or have one twice."""
    measure, held = Measure(), dict.fromkeys(manifest.arrays, 0)
    for shard in manifest.shards:
        for name, box, begin, end in shard.regions:
            held[name] += measure.of(part for _, part in boxes_of(box, begin, end))
    wholes = {
        name: measure.of([[(0, size) for size in shape]])
        for name, shape in manifest.arrays.items()
    }
    return [n for n in held if not measure.are_equal(held[n], wholes[n])]


def _shard_damages(folder: Path, manifest: Manifest, shard: Shard) -> Iterator[Damage]:
    names = list(dict.fromkeys(region[0] for region in shard.regions))
    try:
        reader = ShardReader(folder, manifest, shard, check=False)
    except CheckpointError as error:
        yield Damage(shard.file, "", names, str(error))
        return
    with reader:
        try:
            reader.check()
        except (CheckpointError, OSError) as error:
            yield Damage(shard.file, "", names, str(error))
        for kind in manifest.kinds:
            yield from _block_damages(reader, kind)


def _block_damages(reader: ShardReader, kind: str) -> Iterator[Damage]:
    """Damaged blocks of a dataset, those beside each other as one."""
    size = reader.shard.elements * reader.dtype.itemsize
    numbers = (n for n in range(blocks_of(size)) if not _is_sound(reader, kind, n))
    for _, together in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in together]
        begin, end = run[0] * BLOCK, min(size, (run[-1] + 1) * BLOCK)
        text = reader.damage(kind, begin, end)
        yield Damage(reader.shard.file, kind, reader.parameters(begin, end), text)


def _is_sound(reader: ShardReader, kind: str, number: int) -> bool:
    try:
        reader.block(kind, number)
    except CheckpointError:
        return False
    return True


def _view_damages(path: Path, view: View, arrays: list[str]) -> Iterator[Damage]:
    wrong = ""
    try:
        found = _checksum(path, view.bytes)
        if found != view.sum:
            wrong = "is damaged" if found else f"does not have its {view.bytes} bytes"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}"
    if wrong:
        text = f"{path} {wrong}; the arrays that it shows are in the shards"
        yield Damage(path.name, "", arrays, text)


def _checksum(path: Path, size: int) -> str:
    """Checksum of a file; "" where it has another size. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        if os.fstat(descriptor).st_size != size:
            return ""
        found = xxhash.xxh3_64()
        while data := file.read(BLOCK):
            found.update(data)
    return found.hexdigest()
