"""One rank's file: written with plain writes, read block by block.

HDF5 makes the file's structure, with room for each dataset in one piece; the numbers
are then written to that room directly. So a full disk is an OSError like any other, a
thread can do the work, and reading needs neither locks nor HDF5 to trust a stranger's
file.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import xxhash

from mpipar.checkpoint.files import PatientFile
from mpipar.checkpoint.floats import FLOATS, file_type
from mpipar.checkpoint.manifest import (
    BLOCK,
    Manifest,
    Region,
    Shard,
    checksum,
    shown,
)
from mpipar.comm import file_work, moved
from mpipar.errors import CheckpointError

# Datasets begin at whole pages of memory and disk
_PAGE = 4096
# Where a file of HDF5's oldest format says that it is open, as ours are
_OPEN_FLAGS = 20, 24


def shard_name(rank: int) -> str:
    """File of a rank."""
    return f"shard_{rank:05d}.h5"


@dataclass(frozen=True)
class Layout:
    """What a file is to hold: regions, one after another, of each kind of number."""

    regions: Sequence[Region]
    kinds: Sequence[str]
    dtype: str

    @property
    def elements(self) -> int:
        """Of each dataset."""
        return sum(end - begin for _, _, begin, end in self.regions)


def write_shard(path: Path, layout: Layout, parts: Iterator[np.ndarray]) -> Shard:
    """Writes a file and flushes it to disk.

    parts    arrays that make up the datasets, one kind after the other
    Raises   OSError with the path and the bytes needed
    """
    size = layout.elements * FLOATS[layout.dtype].itemsize
    try:
        offsets = _make_structure(path, layout)
        with file_work("writing", path), path.open("r+b", buffering=0) as file:
            blocks = {}
            for kind in layout.kinds:
                blocks[kind] = _write(file.fileno(), offsets[kind], size, parts)
            # Asking once more gives the last part back before the long wait
            next(parts, None)
            with file_work("flushing", path):
                os.fsync(file.fileno())
            total = os.fstat(file.fileno()).st_size
            rest = _sum_of_rest(file.fileno(), total, offsets.values(), size)
    except OSError as problem:
        needed = size * len(layout.kinds)
        reason = f"{problem.strerror or problem} ({needed:,} bytes to write)"
        raise OSError(problem.errno, reason, str(path)) from problem
    return Shard(
        file=path.name,
        bytes=total,
        elements=layout.elements,
        offsets=offsets,
        blocks=blocks,
        rest=rest,
        regions=list(layout.regions),
    )


def _make_structure(path: Path, layout: Layout) -> dict[str, int]:
    """A file with a dataset of each kind, nothing in it yet; where they begin."""
    kept = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    kept.set_layout(h5py.h5d.CONTIGUOUS)
    kept.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    kept.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    disk, offsets = PatientFile(path), {}
    space = h5py.h5s.create_simple((layout.elements,))
    kind_of_number = file_type(layout.dtype)
    pages = {"alignment_threshold": _PAGE, "alignment_interval": _PAGE}
    with h5py.File(disk, "w", libver="earliest", **pages) as file:
        for kind in layout.kinds:
            made = h5py.h5d.create(
                file.id, kind.encode(), kind_of_number, space, dcpl=kept
            )
            offsets[kind] = made.get_offset()
    disk.close(durable=False)
    return offsets


def _write(file: int, offset: int, size: int, parts: Iterator[np.ndarray]) -> str:
    """Writes `size` bytes of the parts at an offset; the checksums of all blocks."""
    sums, current, done = [], xxhash.xxh3_64(), 0
    while done < size:
        data = memoryview(np.ascontiguousarray(next(parts))).cast("B")
        while data:
            step = min(len(data), BLOCK - done % BLOCK)
            head, data = data[:step], data[step:]
            current.update(head)
            _write_all(file, head, offset + done)
            done += step
            if done % BLOCK == 0 or done == size:
                sums.append(current.hexdigest())
                current.reset()
    return "".join(sums)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
        moved()


def _sum_of_rest(file: int, total: int, offsets: Iterable[int], size: int) -> str:
    """Checksum of what lies between the datasets: the structure of the file.

    Flags by which HDF5 tells that somebody has opened the file for writing count as 0.
    """
    found, place = xxhash.xxh3_64(), 0
    for offset in [*sorted(offsets), total]:
        while place < offset:
            data = os.pread(file, min(BLOCK, offset - place), place)
            if not data:
                break
            if place == 0:
                begin, end = _OPEN_FLAGS
                data = data[:begin] + bytes(end - begin) + data[end:]
            found.update(data)
            place += len(data)
        place = offset + size
    return found.hexdigest()


class ShardReader:
    """Reads the blocks of one file, each checked; the last one of a kind is kept.

    check        False opens a file that is not what was written as well
    bytes_read   so far
    Raises       CheckpointError that names the file, on opening where it is missing or
                 not what was written
    """

    def __init__(
        self, folder: Path, manifest: Manifest, shard: Shard, *, check: bool = True
    ) -> None:
        self.path = folder / shard.file
        self.shard, self.dtype = shard, FLOATS[manifest.dtype]
        self.bytes_read = 0
        self._last: dict[str, tuple[int, np.ndarray]] = {}
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with file_work("opening", self.path):
                self._file = os.open(self.path, flags)
        except OSError as problem:
            raise CheckpointError(
                f"cannot read {self.path}: {problem.strerror}; it holds "
                f"{self._names(0, None)}"
            ) from problem
        try:
            if check:
                self.check()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def blocks_between(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Elements begin .. end of a dataset, cut where blocks end."""
        per_block = BLOCK // self.dtype.itemsize
        while begin < end:
            stop = min(end, (begin // per_block + 1) * per_block)
            yield begin, stop
            begin = stop

    def elements(self, kind: str, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end of a dataset, all of them in one block."""
        number, start = divmod(begin, BLOCK // self.dtype.itemsize)
        return self.block(kind, number)[start : start + end - begin]

    def block(self, kind: str, number: int) -> np.ndarray:
        """One block as an array.

        Raises   CheckpointError that names file, dataset and parameters
        """
        last, array = self._last.get(kind, (-1, None))
        if last == number:
            return array
        begin = number * BLOCK
        size = self.shard.elements * self.dtype.itemsize
        length = min(BLOCK, size - begin)
        data = self._read(self.shard.offsets[kind] + begin, length)
        if checksum(data) != self.shard.block_sum(kind, number):
            raise CheckpointError(self.damage(kind, begin, begin + length))
        array = np.frombuffer(data, self.dtype.newbyteorder("<"))
        self._last[kind] = number, array
        return array

    def parameters(self, begin: int, end: int | None) -> list[str]:
        """Parameters in bytes begin .. end of a dataset; None is its end."""
        item, found = self.dtype.itemsize, []
        for (name, _, lo, hi), place in self.shard.placed():
            inside = end is None or place * item < end
            if inside and (place + hi - lo) * item > begin:
                found.append(name)
        return list(dict.fromkeys(found))

    def damage(self, kind: str, begin: int, end: int) -> str:
        """Says that these bytes of a dataset are damaged."""
        return (
            f"{self.path}: dataset {kind} is damaged in bytes {begin} to {end}, "
            f"which hold {self._names(begin, end)}"
        )

    def check(self) -> None:
        """The size, and everything outside of the datasets.

        Raises   CheckpointError that says what is different
        """
        shard, found = self.shard, os.fstat(self._file).st_size
        if found != shard.bytes:
            raise CheckpointError(
                f"{self.path} has {found} bytes instead of {shard.bytes}; "
                f"it holds {self._names(0, None)}"
            )
        size = shard.elements * self.dtype.itemsize
        try:
            with file_work("reading", self.path):
                rest = _sum_of_rest(self._file, found, shard.offsets.values(), size)
        except OSError as problem:
            raise CheckpointError(f"cannot read {self.path}: {problem}") from problem
        if rest != shard.rest:
            raise CheckpointError(
                f"{self.path} is not the file that was saved: {self._diagnosis()}"
            )

    def _read(self, offset: int, length: int) -> bytes:
        try:
            with file_work("reading", self.path):
                data = os.pread(self._file, length, offset)
                while data and len(data) < length:
                    rest = length - len(data)
                    data += os.pread(self._file, rest, offset + len(data))
        except OSError as problem:
            raise CheckpointError(f"cannot read {self.path}: {problem}") from problem
        self.bytes_read += len(data)
        return data

    def _names(self, begin: int, end: int | None) -> str:
        """The same as words, the first few of them."""
        found = self.parameters(begin, end)
        more = f" and {len(found) - 3} more" if len(found) > 4 else ""
        return ", ".join(found[: 3 if more else 4]) + more or "nothing"

    def _diagnosis(self) -> str:
        """What is different in the structure of the file, as far as HDF5 can tell."""
        holds = f"it holds {self._names(0, None)}"
        try:
            with h5py.File(self.path, "r", locking=False) as file:
                # Names alone: what a stranger's link points to is not opened.
                there = set(file)
        except (OSError, RuntimeError, KeyError, ValueError) as problem:
            return f"HDF5 cannot open it ({problem}); {holds}"
        wanted = self.shard.offsets
        problems = [f"dataset {kind} is missing" for kind in wanted.keys() - there]
        unknown = there - wanted.keys()
        problems += [f"dataset {shown(name)} is unknown" for name in unknown]
        return "; ".join([*sorted(problems), holds] if problems else [
            f"bytes outside of its datasets differ; {holds}"
        ])  # fmt: skip


def open_shards(folder: Path, manifest: Manifest) -> Iterator[ShardReader]:
    """A reader of each file, open while it is iterated over."""
    for shard in manifest.shards:
        with ShardReader(folder, manifest, shard) as reader:
            yield reader
