"""Writes a checkpoint anew: as few or many files, as another type, weights alone.

The new files hold the elements of all arrays, one array after another in row-major
order, cut evenly. The elements of a box in its own order are also in that of the whole
array: any stretch of an array is one stretch of each region, or nothing of it.
"""

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import numpy as np

from mpipar.checkpoint.boxes import Box, boxes_of, elements, lengths
from mpipar.checkpoint.files import flush
from mpipar.checkpoint.floats import FLOATS, converted, wide
from mpipar.checkpoint.folder import point_to
from mpipar.checkpoint.inspect import find, uncovered
from mpipar.checkpoint.manifest import (
    BLOCK,
    MANIFEST,
    Manifest,
    Region,
    Shard,
    read_manifest,
)
from mpipar.checkpoint.saver import conclude
from mpipar.checkpoint.shard import Layout, ShardReader, shard_name, write_shard
from mpipar.errors import CheckpointError, ConfigError

# Files that are open at a time: each keeps a block of what was read last
_OPEN_FILES = 16


@dataclass
class Lost:
    """How many numbers of each kind another type has made infinite or zero."""

    infinite: Counter[str] = field(default_factory=Counter)
    zero: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, before: np.ndarray, after: np.ndarray) -> None:
        """Counts those of an array, as floats of both types."""
        infinite = np.isinf(after) & np.isfinite(before)
        self.infinite[kind] += int(np.count_nonzero(infinite))
        self.zero[kind] += int(np.count_nonzero((after == 0) & (before != 0)))


@dataclass(frozen=True)
class Resharded:
    """A checkpoint that was written anew; bytes  of all its files."""

    folder: Path
    bytes: int
    lost: Lost


def reshard(
    source: Path,
    folder: Path,
    *,
    shards: int = 1,
    dtype: str | None = None,
    weights_only: bool = False,
) -> Resharded:
    """Writes a checkpoint into a new folder, which appears once it is complete.

    It holds a few blocks in memory, whatever the sizes of arrays. Recipe, run and
    progress stay; without another type all numbers are equal bit by bit.

    source        a checkpoint, or a run, whose newest one is meant
    shards        files to write;  dtype  of all numbers, by default as they are
    weights_only  leaves moments out: a run cannot go on from there
    Raises        ConfigError, or CheckpointError that says what is damaged or cannot
                  be written; then nothing is left of it
    """
    folder = Path(os.path.abspath(folder))
    _check(folder, shards)
    origin = find(source)
    manifest = read_manifest(origin)
    if broken := uncovered(manifest):
        raise CheckpointError(
            f"{origin / MANIFEST}: the regions of {broken[0]} do not have each of its "
            "elements once"
        )
    total = sum(map(prod, manifest.arrays.values()))
    if shards > total:
        raise _wrong(f"--shards {shards} must be at most {total}, as many as numbers")
    changes = {
        "layout": "1 file" if shards == 1 else f"{shards} files",
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": dtype or manifest.dtype,
        "kinds": manifest.kinds[: 1 if weights_only else None],
        "views": {},
    }
    draft = folder.with_name(f"{folder.name}.{secrets.token_hex(6)}.tmp")
    lost = Lost()
    try:
        _make_folder(draft)
        with _Source(origin, manifest) as numbers:
            changes["shards"] = []
            for number in range(shards):
                ends = (total * i // shards for i in (number, number + 1))
                regions = list(_stretches(manifest.arrays, *ends))
                layout = Layout(regions, changes["kinds"], changes["dtype"])
                path, parts = draft / shard_name(number), _parts(numbers, layout, lost)
                changes["shards"].append(write_shard(path, layout, parts))
        conclude(draft, Manifest(**{**dict(manifest), **changes}), folder)
        point_to(folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError) as problem:
        raise CheckpointError(f"cannot write {folder}: {problem}") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Resharded(folder, size, lost)


def _check(folder: Path, shards: int) -> None:
    """Refuses a command that cannot be meant."""
    if os.path.lexists(folder):
        raise _wrong(f"{folder} is there already; choose another folder")
    if folder.suffix == ".tmp":
        raise _wrong(f"{folder} must not end in .tmp, as folders do that are not ready")
    if shards < 1:
        raise _wrong(f"--shards {shards} must be at least 1; try 1")


def _wrong(reason: str) -> ConfigError:
    return ConfigError([reason], "the command")


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, on disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir()
        flush(path.parent)


def _stretches(
    arrays: Mapping[str, tuple[int, ...]], begin: int, end: int
) -> Iterator[Region]:
    """Elements begin .. end of all arrays in a row, as regions."""
    place = 0
    for name, shape in arrays.items():
        size = prod(shape)
        lo, hi = max(begin - place, 0), min(end - place, size)
        if lo < hi:
            yield name, tuple((0, length) for length in shape), lo, hi
        place += size


def _parts(source: "_Source", layout: Layout, lost: Lost) -> Iterator[np.ndarray]:
    """What a new file is to hold, a block at a time."""
    dtype = source.manifest.dtype
    step = BLOCK // source.manifest.item
    for kind in layout.kinds:
        for name, _, begin, end in layout.regions:
            for lo in range(begin, end, step):
                x = source.read(kind, name, lo, min(end, lo + step))
                if layout.dtype != dtype:
                    before = x
                    # Overflow is counted instead.
                    with np.errstate(all="ignore"):
                        x = converted(before, dtype, layout.dtype)
                    lost.note(kind, wide(before, dtype), wide(x, layout.dtype))
                yield x


class _Source:
    """The numbers of a checkpoint, by name and place in the whole array."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._kind, self._open = "", dict[str, ShardReader]()
        self._regions: dict[str, list[tuple[Shard, Region, int]]] = {}
        for shard in manifest.shards:
            for region, place in shard.placed():
                held = self._regions.setdefault(region[0], [])
                held.append((shard, region, place))

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, kind: str, name: str, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end of an array.

        Raises   CheckpointError that names what is damaged
        """
        if kind != self._kind:
            # Files keep their last block of each kind.
            self._close()
            self._kind = kind
        shape = self.manifest.arrays[name]
        out = np.empty(end - begin, FLOATS[self.manifest.dtype])
        strides = [prod(shape[dim + 1 :]) * out.itemsize for dim in range(len(shape))]
        for shard, region, place in self._regions[name]:
            _, box, lo, hi = region
            first = max(lo, _before(box, shape, begin))
            last = min(hi, _before(box, shape, end))
            for part, data in self._pieces(shard, region, place, first, last):
                corner = sum(b * s for (b, _), s in zip(part, strides, strict=True))
                offset = corner - begin * out.itemsize
                np.ndarray(data.shape, out.dtype, out, offset, strides)[...] = data
        return out

    def _pieces(
        self, shard: Shard, region: Region, place: int, first: int, last: int
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Elements first .. last of a region's box, as boxes.

        place   where the region begins in the dataset
        """
        if first >= last:
            return
        _, box, begin, _ = region
        reader = self._reader(shard)
        start = place - begin
        for lo, hi in reader.blocks_between(start + first, start + last):
            data = reader.elements(self._kind, lo, hi)
            for at, part in boxes_of(box, lo - start, hi - start):
                own = data[at - (lo - start) :][: elements(part)]
                yield part, own.reshape(lengths(part))

    def _reader(self, shard: Shard) -> ShardReader:
        """An open file; the one whose last use is longest ago is closed for it."""
        reader = self._open.pop(shard.file, None)
        if reader is None:
            if len(self._open) == _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            reader = ShardReader(self.folder, self.manifest, shard)
        self._open[shard.file] = reader
        return reader

    def _close(self) -> None:
        for reader in self._open.values():
            reader.close()
        self._open.clear()


def _before(box: Box, shape: Sequence[int], place: int) -> int:
    """How many elements of a box come before element `place` of the whole array."""
    count, inside, row = 0, elements(box), prod(shape)
    for (lo, hi), size in zip(box, shape, strict=True):
        inside, row = inside // (hi - lo), row // size
        number, place = divmod(place, row)
        count += min(max(number - lo, 0), hi - lo) * inside
        if not lo <= number < hi:
            break
    return count
