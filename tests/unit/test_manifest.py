"""Manifests from strangers: each is refused by name, and costs next to nothing.

Their checksum is right, unless it is what is wrong: anyone can make one.
"""

import json
import os
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from saved import OPS, Fragment, in_child, is_of, load, read, save, tamper

from mpipar.checkpoint import read_manifest
from mpipar.checkpoint.shard import Layout, write_shard
from mpipar.errors import CheckpointError

Body = dict[str, Any]
GAIN = "blocks.0.norm1.gain"
NONE = 10**9
MIB = 1 << 20
_watched: list[str] | None = None


def _note_open(event: str, args: tuple) -> None:
    if _watched is not None and event == "open":
        _watched.append(str(args[0]))


sys.addaudithook(_note_open)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Files that Python opens from here on."""
    global _watched
    _watched = []
    yield _watched
    _watched = None


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run"), 10).folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, with a file beside it that is not part of it."""
    copy = tmp_path / "checkpoints" / original.name
    shutil.copytree(original, copy)
    shutil.copy(copy / "shard_00000.h5", tmp_path / "checkpoints" / "secret.h5")
    return copy


def refusal(folder: Path) -> str:
    """Why nothing can be read; that takes no memory to speak of."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert str(folder) in text and "Traceback" not in text
    # A terminal takes control characters for commands.
    assert all(c.isprintable() or c == "\n" for c in text)
    return text


def shard(body: Body) -> Body:
    return body["shards"][0]


def region(body: Body, name: str = GAIN) -> list:
    return next(r for r in shard(body)["regions"] if r[0] == name)


# What a stranger may write into a manifest

FILES = {
    "above": "../secret.h5", "absolute": "/etc/passwd", "deep": "sub/x.h5",
    "here": "./shard_00000.h5", "empty": "", "dots": "..", "no h5": "shard_00000",
    "hidden": ".h5", "newline": "shard_00000.h5\n", "null": "shard\0.h5",
    "windows": "..\\secret.h5", "wide": "shаrd_00000.h5", "number": 7, "list": ["x.h5"],
    "long": "x" * 100000 + ".h5", "device": "/dev/zero", "surrogate": "\udcff.h5",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES.values(), ids=FILES)
def test_no_name_leads_out_of_the_folder(
    folder: Path, opened: list[str], name: object
) -> None:
    tamper(folder, lambda body: shard(body).update(file=name))
    opened.clear()
    refusal(folder)
    inside = [Path(file).resolve().is_relative_to(folder) for file in opened]
    assert all(inside) and len(opened) <= 2, opened


VIEWS = [x for x in FILES.values() if isinstance(x, str) and len(x) < 99]


@pytest.mark.parametrize("name", VIEWS)
def test_no_view_leads_out_of_the_folder(folder: Path, name: str) -> None:
    view = {"bytes": 1, "sum": "0" * 16}
    tamper(folder, lambda body: body["views"].update({name: view}))
    refusal(folder)


def link_to(target: str) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return make


def become_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def become_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "change",
    [link_to("../secret.h5"), link_to("/dev/zero"), link_to("nowhere"),
     become_folder, become_pipe],
    ids=["link", "device", "dangling", "folder", "pipe"],
)  # fmt: skip
@pytest.mark.parametrize("size", ["as saved", "as it is", "nothing"])
def test_a_shard_is_a_plain_file_in_the_folder(
    folder: Path, change: Callable[[Path], None], size: str
) -> None:
    """Also where the link leads to the very bytes that were saved."""
    file = folder / "shard_00000.h5"
    change(file)
    if size != "as saved":
        told = os.lstat(file).st_size if size == "as it is" else 0

        def lie(body: Body) -> None:
            shard(body).update(bytes=told, elements=0, regions=[])
            shard(body).update(offsets=dict.fromkeys(body["kinds"], 0))
            shard(body)["blocks"] = dict.fromkeys(body["kinds"], "")

        tamper(folder, lie)
    assert "shard_00000.h5" in refusal(folder) or size != "as saved"


def test_hdf5_links_of_a_stranger_are_not_followed(folder: Path) -> None:
    """To open a pipe waits for ever."""
    file, pipe = folder / "shard_00000.h5", folder.parent / "pipe"
    os.mkfifo(pipe)
    with h5py.File(file, "a", locking=False) as h5:
        del h5["weights"]
        h5["weights"] = h5py.ExternalLink(str(pipe), "/x")
        h5["\x1b]0;strange"] = h5py.SoftLink("/weights")
    tamper(folder, lambda body: shard(body).update(bytes=file.stat().st_size))
    assert in_child(lambda: refusal(folder)) == 0


HUGE = {
    "elements": lambda b: shard(b).update(elements=2**62 - 1),
    "more elements": lambda b: shard(b).update(elements=shard(b)["elements"] + 1),
    "elements below 0": lambda b: shard(b).update(elements=-1),
    "bytes": lambda b: shard(b).update(bytes=2**62 - 1),
    "too large a number": lambda b: shard(b).update(bytes=10**400),
    "array": lambda b: b["arrays"].update({GAIN: [2**61]}),
    "region": lambda b: (
        b["arrays"].update({GAIN: [2**61]}),
        region(b).__setitem__(slice(1, 4), [[[0, 2**61]], 0, 2**61]),
    ),
    "dims": lambda b: b["arrays"].update({GAIN: [1] * 10**5}),
    "product": lambda b: b["arrays"].update({GAIN: [2**61] * 300}),
    "arrays": lambda b: b["arrays"].update({f"a{i}": [1] for i in range(10**4)}),
    "a dim of 0": lambda b: b["arrays"].update({GAIN: [0, 4]}),
    "no dims": lambda b: b["arrays"].update({GAIN: []}),
    "a dim below 0": lambda b: b["arrays"].update({GAIN: [-4]}),
    "another size of a number": lambda b: b.update(dtype="float32"),
    "a fraction": lambda b: b["arrays"].update({GAIN: [4.5]}),
    "not a number": lambda b: b["progress"].update(loss_scale=float("nan")),
}


@pytest.mark.parametrize("change", HUGE.values(), ids=HUGE)
def test_sizes_that_cannot_be_are_refused(folder: Path, change) -> None:
    tamper(folder, change)
    refusal(folder)


def test_a_file_of_zeros_of_any_size_costs_no_memory(folder: Path) -> None:
    """Everything in the manifest fits, and the file is as large as it says."""
    file, count = folder / "shard_00000.h5", 1 << 23

    def lie(body: Body) -> None:
        body.update(kinds=["weights"], arrays={GAIN: [count]})
        blocks = {"weights": "0" * 16 * (count * 8 // MIB)}
        shard(body).update(bytes=8 * count, elements=count, offsets={"weights": 0},
                           blocks=blocks, rest="2d06800538d394c2",
                           regions=[[GAIN, [[0, count]], 0, count]])  # fmt: skip

    os.truncate(file, 8 * count)
    tamper(folder, lie)
    assert "damaged" in refuse_weights(folder, count)


def refuse_weights(folder: Path, count: int) -> str:
    fragment = Fragment(GAIN, (count,), ((0, count),), 0, count)
    fragment.arrays["weights"] = np.zeros(count)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        load(folder, read_manifest(folder), [fragment], OPS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MIB
    return str(caught.value)


CONTRADICTIONS = {
    "offset behind the end": lambda b: shard(b)["offsets"].update(m=NONE),
    "offset below 0": lambda b: shard(b)["offsets"].update(m=-8),
    "overlapping datasets": lambda b: shard(b)["offsets"].update(
        m=shard(b)["offsets"]["weights"] + 8
    ),
    "the same dataset": lambda b: shard(b)["offsets"].update(
        m=shard(b)["offsets"]["weights"]
    ),
    "a sum too few": lambda b: shard(b)["blocks"].update(v=""),
    "a sum too many": lambda b: shard(b)["blocks"].update(
        v=shard(b)["blocks"]["v"] * 2
    ),
    "half a sum": lambda b: shard(b)["blocks"].update(v=shard(b)["blocks"]["v"][:8]),
    "no sum of the rest": lambda b: shard(b).update(rest=""),
    "a missing region": lambda b: shard(b)["regions"].remove(region(b)),
    "a region twice": lambda b: shard(b)["regions"].append(region(b)),
    "a region without elements": lambda b: region(b).__setitem__(3, 0),
    "a region backwards": lambda b: region(b).__setitem__(slice(2, 4), [4, 0]),
    "a region beyond its box": lambda b: region(b).__setitem__(3, 5),
    "a box beyond the array": lambda b: region(b).__setitem__(1, [[1, 5]]),
    "a box backwards": lambda b: region(b).__setitem__(1, [[4, 0]]),
    "a box of other dims": lambda b: region(b).__setitem__(1, [[0, 4], [0, 1]]),
    "a region of another array": lambda b: region(b).__setitem__(0, "blocks.1.gain"),
    "an array without regions": lambda b: b["arrays"].update({"blocks.1.gain": [4]}),
    "no shards": lambda b: b.update(shards=[]),
    "a shard twice": lambda b: b["shards"].append(shard(b)),
    "a shard that is a view": lambda b: shard(b).update(file="model.h5"),
    "a kind without a dataset": lambda b: b["kinds"].append("w"),
    "a dataset of no kind": lambda b: b["kinds"].remove("v"),
    "a kind twice": lambda b: b["kinds"].append("v"),
    "no kinds": lambda b: b.update(kinds=[]),
    "no weights": lambda b: b["kinds"].reverse(),
    "an unknown type": lambda b: b.update(dtype="object"),
    "a strange key": lambda b: b.update({"\x1b[2J\x07\n": 1}),
    "a missing key": lambda b: b.pop("recipe"),
    "a name with a path": lambda b: b["arrays"].update({"../x": [4]}),
    "another creator": lambda b: b.update(creator="torch"),
    "a list": lambda b: b.update(progress=[]),
    "null": lambda b: b.update(shards=None),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_refused(folder: Path, change) -> None:
    tamper(folder, change)
    assert "manifest.json" in refusal(folder)


def test_as_many_elements_in_the_wrong_places_are_refused(folder: Path) -> None:
    """Half of an array twice and the other half never: all sums are right."""
    halves = [[GAIN, [[0, 2]], 0, 2], [GAIN, [[0, 2]], 0, 2]]

    def change(body: Body) -> None:
        place = shard(body)["regions"].index(region(body))
        shard(body)["regions"][place : place + 1] = halves

    tamper(folder, change)
    text = refusal(folder)
    assert GAIN in text and "once" in text


@pytest.mark.parametrize("told", [1, 3, 2.5, "2", None, [[[]]], "\x1b[31m" * 99])
def test_another_format_is_named(folder: Path, told: object) -> None:
    tamper(folder, lambda body: body.update(format=told))
    text = refusal(folder)
    assert "this version reads 2" in text and len(text) < 300


# What is no manifest at all

DEEP = [10, 500, *range(900, 1010), 10**5]


@pytest.mark.parametrize(("open_", "close"), ["[]", ('{"x":', "}")], ids=["[", "{"])
@pytest.mark.parametrize("key", ["", "format", "x"])
def test_deep_json_is_refused(folder: Path, open_: str, close: str, key: str) -> None:
    """At each depth where one part of the reader may give up, and another not yet."""
    known = '"creator":"mpipar",' + ('"format":2,' if key == "x" else "")
    for depth in DEEP:
        deep = open_ * depth + "1" + close * depth
        text = f'{{"manifest":{{{known}"{key}":{deep}}}}}' if key else deep
        (folder / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=re.escape("manifest.json")):
            read_manifest(folder)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"\xff\xfe{}", b"null", b"[]", b"{}", b'{"manifest":3}',
     b'{"manifest":[{"creator":"mpipar"}]}', b'"manifest"', b"\x89HDF\r\n\x1a\n",
     b"\xed\xa0\x80", b"1" * 10000, b"{" * 10000, b"{}" * 10000],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(folder: Path, data: bytes) -> None:
    (folder / "manifest.json").write_bytes(data)
    assert "manifest.json" in refusal(folder)


def test_a_text_that_is_not_utf_8_is_refused(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b"recipe of", b"recipe \xe9f"))
    assert "manifest.json" in refusal(folder)


def test_a_change_of_any_byte_is_seen(original: Path, folder: Path) -> None:
    file, data = folder / "manifest.json", (original / "manifest.json").read_bytes()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=re.escape("manifest.json")):
            read_manifest(folder)


def test_a_cut_anywhere_is_seen(original: Path, folder: Path) -> None:
    file, data = folder / "manifest.json", (original / "manifest.json").read_bytes()
    for size in range(len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=re.escape("manifest.json")):
            read_manifest(folder)
    file.write_bytes(data + b" ")
    with pytest.raises(CheckpointError, match="checksum"):
        read_manifest(folder)


def test_the_same_content_in_other_words_is_refused(folder: Path) -> None:
    """There is one text for each manifest, so that its checksum means something."""
    file = folder / "manifest.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole, indent=1))
    with pytest.raises(CheckpointError, match="checksum"):
        read_manifest(folder)


def test_what_nobody_changed_is_read(folder: Path) -> None:
    """The other tests would prove nothing without it."""
    tamper(folder, lambda body: None)
    assert is_of(folder, 0)


def test_a_shard_knows_its_own_sums(tmp_path: Path) -> None:
    """Blocks of a MiB: the last one is short, and each has a sum of its own."""
    count = 3 * MIB // 8 + 5
    x = np.random.default_rng(0).normal(size=count)
    regions = [("a.weight", ((0, count),), 0, count)]
    shard = write_shard(tmp_path / "a.h5", Layout(regions, ["weights"], "float64"),
                        iter(np.array_split(x, 7)))  # fmt: skip
    sums = shard.blocks["weights"]
    assert (
        len(sums) == 4 * 16 and len({sums[i : i + 16] for i in range(0, 64, 16)}) == 4
    )
    with h5py.File(tmp_path / "a.h5") as h5:
        assert np.array_equal(h5["weights"][()], x)
