"""model.h5 and optimizer.h5: every saved array as one global HDF5 dataset.

They hold no numbers: virtual datasets point into the shards beside them, by relative
name, so that the folder can be moved and any HDF5 tool reads whole arrays, whatever the
layout was.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from mpipar.checkpoint.boxes import Box, boxes_of, elements, lengths
from mpipar.checkpoint.files import flush
from mpipar.checkpoint.floats import file_type
from mpipar.checkpoint.manifest import Manifest, Shard, View, checksum
from mpipar.comm import file_work

MODEL, OPTIMIZER = "model.h5", "optimizer.h5"


class Link(NamedTuple):
    """A box of a global array, and where its elements begin in the datasets of a
    shard."""

    shard: Shard
    begin: int
    box: Box


def dataset_name(parameter: str) -> str:
    """blocks.3.attention.q.weight is the dataset blocks/3/attention/q/weight."""
    return parameter.replace(".", "/")


def write_views(folder: Path, manifest: Manifest) -> dict[str, View]:
    """Writes the files that show the shards of a manifest, flushed to disk.

    The weights are in model.h5; other kinds are groups of optimizer.h5, such as m and
    v. Raises OSError.
    """
    views = {MODEL: _write(folder / MODEL, manifest, {"weights": ""})}
    others = {kind: f"{kind}/" for kind in manifest.kinds[1:]}
    if others:
        views[OPTIMIZER] = _write(folder / OPTIMIZER, manifest, others)
    return views


def _write(path: Path, manifest: Manifest, groups: dict[str, str]) -> View:
    # Made in memory: HDF5 writes it in thousands of small pieces.
    with h5py.File(path, "w", driver="core", backing_store=False) as file:
        file.attrs["creator"] = manifest.creator
        file.attrs["format"] = manifest.format
        file.attrs["step"] = manifest.progress.step
        file.attrs["recipe"] = manifest.recipe
        links = _links(manifest)
        for kind, group in groups.items():
            for name, shape in manifest.arrays.items():
                place = (group + dataset_name(name)).encode()
                _show(file, place, shape, manifest.dtype, kind, links[name])
        file.flush()
        data = file.id.get_file_image()
    with file_work("writing", path):
        path.write_bytes(data)
    flush(path)
    return View(bytes=len(data), sum=checksum(data))


def _show(
    file: h5py.File,
    place: bytes,
    shape: tuple[int, ...],
    dtype: str,
    kind: str,
    links: Sequence[Link],
) -> None:
    """Makes the virtual dataset of one array."""
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # Shown where a shard is missing
    made.set_fill_value(np.array(np.nan, np.float32))
    whole = h5py.h5s.create_simple(shape)
    for link in links:
        whole.select_hyperslab(tuple(lo for lo, _ in link.box), lengths(link.box))
        source = h5py.h5s.create_simple((link.shard.elements,))
        source.select_hyperslab((link.begin,), (elements(link.box),))
        made.set_virtual(whole, link.shard.file.encode(), kind.encode(), source)
    parents = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    parents.set_create_intermediate_group(True)
    whole.select_all()
    h5py.h5d.create(file.id, place, file_type(dtype), whole, made, parents)


def _links(manifest: Manifest) -> dict[str, list[Link]]:
    """Where the boxes of each array are."""
    found: dict[str, list[Link]] = {name: [] for name in manifest.arrays}
    for shard in manifest.shards:
        for (name, box, begin, end), place in shard.placed():
            for start, part in boxes_of(box, begin, end):
                found[name].append(Link(shard, place + start - begin, part))
    return found
