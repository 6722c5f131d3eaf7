"""Fills what a rank holds from a checkpoint of any layout, reading what it needs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint.boxes import (
    Box,
    Measure,
    boxes_of,
    elements,
    intersection,
    lengths,
    within,
)
from mpipar.checkpoint.floats import converted
from mpipar.checkpoint.fragments import Fragment
from mpipar.checkpoint.manifest import Manifest, Region
from mpipar.checkpoint.shard import ShardReader, open_shards
from mpipar.errors import CheckpointError
from mpipar.ops import Ops

Array = Any
Put = Callable[[np.ndarray, Array], None]


def load(
    folder: Path,
    manifest: Manifest,
    fragments: Sequence[Fragment],
    ops: Ops,
    kinds: Mapping[str, str] | None = None,
) -> int:
    """Fills the arrays of fragments from the saved regions that cover them.

    Files are read block by block; a block that has nothing for this rank is not read,
    and each is checked against its checksum.

    kinds     which kind is saved as which; by default each as itself
    Returns   bytes read
    Raises    CheckpointError that names each parameter that is missing or has another
              shape, or the file, dataset and parameters that are damaged
    """
    kinds = kinds or {kind: kind for f in fragments for kind in f.arrays}
    _check(folder, manifest, fragments, kinds.values())
    wanted: dict[str, list[_Wanted]] = {}
    for fragment in fragments:
        wanted.setdefault(fragment.name, []).append(_Wanted(fragment))
    dtype = np.dtype(ops.dtype).name

    def put(part: np.ndarray, out: Array) -> None:
        ops.store(ops.asarray(converted(part, manifest.dtype, dtype)), out)

    count = 0
    for reader in _open_needed(folder, manifest, wanted):
        for region, place in reader.shard.placed():
            here = [w for w in wanted.get(region[0], ()) if w.needs(region[1])]
            for kind, saved in kinds.items() if here else ():
                _read_region(reader, region, place, saved, kind, here, put)
        count += reader.bytes_read
    for fragment in (w for all_of_name in wanted.values() for w in all_of_name):
        fragment.check_filled(folder, len(kinds))
    return count


class _Wanted:
    """A fragment as boxes, and how much of it is there."""

    def __init__(self, fragment: Fragment) -> None:
        self.fragment = f = fragment
        self.boxes = [
            (place - f.begin, box) for place, box in boxes_of(f.box, f.begin, f.end)
        ]
        self._measure, self._filled = Measure(), 0

    def needs(self, box: Box) -> bool:
        """True if some of the box is wanted."""
        return any(intersection(box, own) for _, own in self.boxes)

    def fill(self, kind: str, saved: Box, data: np.ndarray, put: Put) -> None:
        """Takes what is wanted of a box; data is what was saved of it, flat."""
        for place, own in self.boxes:
            both = intersection(own, saved)
            if both is None:
                continue
            shape = lengths(own)
            flat = self.fragment.arrays[kind][place : place + elements(own)]
            out = flat.reshape(shape)[within(both, own)]
            put(data.reshape(lengths(saved))[within(both, saved)], out)
            self._filled += self._measure.of([both])

    def check_filled(self, folder: Path, kinds: int) -> None:
        """Each element must have come once."""
        f, wanted = self.fragment, self._measure.of(box for _, box in self.boxes)
        if not self._measure.are_equal(self._filled, wanted * kinds):
            raise CheckpointError(
                f"{folder}: the regions of {f.name} do not cover {f.box} once"
            )


def _open_needed(
    folder: Path, manifest: Manifest, wanted: Mapping[str, Sequence[_Wanted]]
) -> Iterable[ShardReader]:
    """Readers of the files that have something of what is wanted, one at a time."""

    def has_some(regions: Sequence[Region]) -> bool:
        return any(
            w.needs(part)
            for name, box, begin, end in regions
            if name in wanted
            for _, part in boxes_of(box, begin, end)
            for w in wanted[name]
        )

    needed = [shard for shard in manifest.shards if has_some(shard.regions)]
    return open_shards(folder, manifest.model_copy(update={"shards": needed}))


def _read_region(
    reader: ShardReader,
    region: Region,
    place: int,
    saved: str,
    kind: str,
    wanted: Sequence[_Wanted],
    put: Put,
) -> None:
    """Fills what is wanted of one region, which begins at `place` of dataset `saved`.

    The parts of it in one block are boxes again.
    """
    _, box, begin, end = region
    for lo, hi in reader.blocks_between(place, place + end - begin):
        # Elements lo .. hi of the dataset are those from `first` on of the box.
        first = begin + lo - place
        parts = list(boxes_of(box, first, first + hi - lo))
        if not any(w.needs(part) for w in wanted for _, part in parts):
            continue
        data = reader.elements(saved, lo, hi)
        for start, part in parts:
            own = data[start - first :][: elements(part)]
            for w in wanted:
                w.fill(kind, part, own, put)


def _check(
    folder: Path,
    manifest: Manifest,
    fragments: Sequence[Fragment],
    kinds: Iterable[str],
) -> None:
    """Refuses a checkpoint of another model, naming all differences."""
    problems = [
        f"it has no {kind}, only {', '.join(manifest.kinds)}"
        for kind in kinds
        if kind not in manifest.kinds
    ]
    for f in fragments:
        shape = manifest.arrays.get(f.name)
        if shape is None:
            problems.append(f"{f.name} is missing")
        elif shape != tuple(f.shape):
            problems.append(f"{f.name} has shape {shape}, expected {f.shape}")
    if problems:
        raise CheckpointError(f"{folder}: " + "; ".join(dict.fromkeys(problems)))
