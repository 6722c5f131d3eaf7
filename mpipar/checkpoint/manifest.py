"""manifest.json: what a checkpoint holds, where it lies, and the checksums of it all.

A checkpoint is a folder with a manifest. Each shard is an HDF5 file of one rank with a
flat dataset for every kind of number (weights, moments); a region says which stretch
of it belongs to which box of which global array. Everything in here may come from a
stranger: it is checked before memory is taken or a file is opened.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mpipar.checkpoint.boxes import Box, elements
from mpipar.checkpoint.floats import FLOATS
from mpipar.comm import file_work
from mpipar.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
# Bytes of a dataset under one checksum: the least that is read
BLOCK = 1 << 20
_DIGITS = 16
# No manifest is larger: a million regions are a tenth of it
_LARGEST = 1 << 30

Count = Annotated[int, Field(ge=0, lt=2**62)]
Sum = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{_DIGITS}}}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\.h5$")]
Kind = Annotated[str, Field(pattern=r"^[a-z]+$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]
# HDF5 has no more dims
Length = Annotated[int, Field(ge=1, lt=2**62)]
Shape = Annotated[tuple[Length, ...], Field(min_length=1, max_length=32)]
Region = tuple[Name, tuple[tuple[Count, Count], ...], Count, Count]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Progress(_Part):
    """Where a run was.

    step            updates that the schedule of the learning rate has seen
    updates         of the optimizer; fewer where steps were skipped
    samples         sequences trained on: number of the next one
    tokens          labels that have counted so far
    train_samples   sequences of an epoch;  0 = not known
    loss_scale, good_steps   of fp16;  open_scale  what the loss of a batch that is open
                    was multiplied by;  0 = none is open
    """

    step: Count
    updates: Count = 0
    samples: Count = 0
    tokens: Count = 0
    train_samples: Count = 0
    loss_scale: Annotated[float, Field(gt=0)] = 1.0
    good_steps: Count = 0
    open_scale: Annotated[float, Field(ge=0)] = 0.0


class Shard(_Part):
    """One file.

    bytes     its size;  elements  of each dataset
    offsets   where the dataset of each kind begins in the file
    blocks    for each kind the checksums of its blocks, one after another
    rest      checksum of all bytes outside of the datasets
    regions   (name, box, begin, end): elements begin .. end of the box; the datasets
              hold them one region after another
    """

    file: FileName
    bytes: Count
    elements: Count
    offsets: dict[Kind, Count]
    blocks: dict[Kind, str]
    rest: Sum
    regions: list[Region]

    def block_sum(self, kind: str, number: int) -> str:
        """Checksum of a block."""
        return self.blocks[kind][number * _DIGITS : (number + 1) * _DIGITS]

    def placed(self) -> Iterator[tuple[Region, int]]:
        """Each region and where it begins in the datasets."""
        place = 0
        for region in self.regions:
            yield region, place
            place += region[3] - region[2]


class View(_Part):
    """A file that shows global arrays."""

    bytes: Count
    sum: Sum


class Manifest(_Part):
    """What a checkpoint holds.

    run       id of the run that made it;  saved  when, ISO 8601
    recipe    resolved, as TOML;  layout  in words
    dtype     type of all numbers;  kinds  of numbers, "weights" first
    arrays    shapes of the global arrays, in the order of the model
    """

    format: Literal[2]
    creator: str
    run: str
    saved: str
    recipe: str
    layout: str
    progress: Progress
    dtype: Literal[tuple(FLOATS)]
    kinds: Annotated[list[Kind], Field(min_length=1)]
    arrays: dict[Name, Shape]
    shards: list[Shard]
    views: dict[FileName, View]

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return FLOATS[self.dtype].itemsize

    @property
    def files(self) -> dict[str, int]:
        """Sizes of all files but the manifest."""
        shards = {shard.file: shard.bytes for shard in self.shards}
        return shards | {name: view.bytes for name, view in self.views.items()}

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(self.files.values())

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        if self.kinds[0] != "weights" or len(set(self.kinds)) < len(self.kinds):
            raise ValueError("kinds must be different ones, weights first")
        for name in self.arrays:
            if any(name[:dot] in self.arrays for dot in _dots(name)):
                raise ValueError(f"{name} is inside of another array")
        names = [shard.file for shard in self.shards] + list(self.views)
        if len(set(names)) < len(names):
            raise ValueError("a file is listed twice")
        held = dict.fromkeys(self.arrays, 0)
        for shard in self.shards:
            self._check_datasets(shard)
            for name, box, begin, end in shard.regions:
                shape = self.arrays.get(name)
                if shape is None or not _fits(box, shape) or begin >= end:
                    raise ValueError(f"{shard.file}: {name} has a region outside of it")
                if end > elements(box):
                    raise ValueError(f"{shard.file}: {name} has a region outside of it")
                held[name] += end - begin
        for name, shape in self.arrays.items():
            if held[name] != math.prod(shape):
                raise ValueError(
                    f"{name} has {math.prod(shape)} elements, the shards hold "
                    f"{held[name]} of them"
                )
        return self

    def _check_datasets(self, shard: Shard) -> None:
        """Datasets lie in the file one behind another, and every block has its sum."""
        size = shard.elements * self.item
        if set(shard.offsets) != set(self.kinds) or set(shard.blocks) != set(
            self.kinds
        ):
            raise ValueError(f"{shard.file} must have {', '.join(self.kinds)}")
        if sum(end - begin for _, _, begin, end in shard.regions) != shard.elements:
            raise ValueError(f"{shard.file} has other regions than elements")
        free = 0
        for offset in sorted(shard.offsets.values()):
            if offset < free or offset + size > shard.bytes:
                raise ValueError(f"{shard.file}: a dataset lies outside of the file")
            free = offset + size
        digits = _DIGITS * blocks_of(size)
        if any(len(sums) != digits for sums in shard.blocks.values()):
            raise ValueError(f"{shard.file} does not have a checksum for every block")


def _dots(name: str) -> Iterator[int]:
    """Where the dots of a name are."""
    return (place for place, letter in enumerate(name) if letter == ".")


def blocks_of(size: int) -> int:
    """Blocks of so many bytes."""
    return -(-size // BLOCK)


def checksum(data: Any) -> str:
    """64 bits of XXH3 in hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def encode(manifest: Manifest) -> str:
    """The text of manifest.json: the manifest and its own checksum."""
    body = manifest.model_dump(mode="json")
    return _frame(body)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked.

    Raises   CheckpointError where it is damaged, foreign or contradicts itself
    """
    file = folder / MANIFEST
    try:
        with file_work("reading", file):
            if file.stat().st_size > _LARGEST:
                raise CheckpointError(f"{file} is larger than any manifest")
            # As it is: reading as text would turn \r into \n.
            text = file.read_bytes().decode()
        body = json.loads(text)["manifest"]
    except OSError as problem:
        raise CheckpointError(f"cannot read {file}: {problem}") from problem
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise CheckpointError(f"{file} is not a manifest: {problem}") from problem
    if not isinstance(body, dict) or body.get("creator") != "mpipar":
        raise CheckpointError(f"{file} is not the manifest of a checkpoint of mpipar")
    if body.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {shown(body.get('format'))}, this version reads "
            f"{FORMAT}"
        )
    if text != _frame(body):
        raise CheckpointError(f"{file} was changed or damaged: its checksum is wrong")
    try:
        return Manifest.model_validate(body)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = _printable(".".join(map(str, first["loc"])))[:80]
        raise CheckpointError(
            f"{file} contradicts itself: {where} {first['msg']}".replace("  ", " ")
        ) from None


def _frame(body: dict[str, Any]) -> str:
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"checksum":"{checksum(text.encode())}","manifest":{text}}}\n'


def _fits(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(
        lo < hi <= size for (lo, hi), size in zip(box, shape, strict=True)
    )


def shown(value: object, width: int = 40) -> str:
    """A value from a stranger, for a message."""
    return _printable(repr(value))[:width]


def _printable(text: str) -> str:
    return re.sub(r"[^ -~]", "?", text)
