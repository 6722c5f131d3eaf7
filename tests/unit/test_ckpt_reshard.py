"""mpipar ckpt reshard: the same numbers in other files, nothing half there."""

import os
import shutil
import subprocess
import sys
import tracemalloc
from math import prod
from pathlib import Path

import h5py
import numpy as np
import pytest
from ckpt_cases import (
    KINDS,
    SHAPES,
    assert_equal,
    flip,
    make_arrays,
    make_command,
    read,
    save,
    shrink_blocks,
)  # fmt: skip

from mpipar.checkpoint import Fragment, load, look, read_manifest, reshard, verify
from mpipar.checkpoint.floats import FLOATS
from mpipar.cli import entry
from mpipar.errors import CheckpointError
from mpipar.ops import make_ops


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    return make_command(capsys, monkeypatch)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_blocks(monkeypatch)


@pytest.mark.parametrize(("columns", "parts"), [(1, 1), (2, 3), (5, 7)])
def test_numbers_stay_bit_by_bit(
    command, small_blocks, tmp_path: Path, columns: int, parts: int
) -> None:
    arrays = make_arrays()
    source = save(tmp_path / "a", 5, arrays, columns, parts)
    total = sum(map(prod, SHAPES.values()))
    for count in (1, 5):
        new = tmp_path / f"weights.v{count}"
        assert command("reshard", tmp_path / "a", new, "--shards", count)[0] == 0
        assert_equal(read(new), arrays)
        before, after = read_manifest(source), read_manifest(new)
        sizes = [shard.elements for shard in after.shards]
        assert len(sizes) == count and sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1
        same = "run", "recipe", "progress", "dtype", "kinds", "arrays"
        assert all(getattr(before, key) == getattr(after, key) for key in same)
        assert list(before.arrays) == list(after.arrays)
        verdict = verify(new)
        assert not verdict.damages and not verdict.strays
        back = reshard(new, tmp_path / f"back{count}", shards=2)
        assert_equal(read(back.folder), arrays)
    names = {path.name for path in tmp_path.iterdir()}
    assert not any(name.endswith(".tmp") for name in names) and "latest" not in names


def test_few_files_are_open_at_a_time(
    small_blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["mpipar.checkpoint.reshard"], "_OPEN_FILES", 2)
    arrays = make_arrays()
    source = save(tmp_path, 5, arrays, 4, 2)
    before = len(os.listdir("/proc/self/fd"))
    assert_equal(read(reshard(source, tmp_path / "new").folder), arrays)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_written_loads(tmp_path: Path) -> None:
    arrays = make_arrays()
    done = reshard(save(tmp_path, 1, arrays), tmp_path / "new", shards=3)
    wanted = [
        Fragment(n, s, tuple((0, k) for k in s), 0, prod(s),
                 {kind: np.empty(prod(s), np.float32) for kind in KINDS})
        for n, s in SHAPES.items()
    ]  # fmt: skip
    load(done.folder, read_manifest(done.folder), wanted, make_ops("cpu", "fp32"))
    for fragment in wanted:
        for kind in KINDS:
            expected = arrays[kind][fragment.name].ravel()
            assert np.array_equal(fragment.arrays[kind], expected)


def test_weights_alone(command, tmp_path: Path) -> None:
    source = save(tmp_path, 1, make_arrays())
    new = tmp_path / "deep" / "down" / "weights"
    assert command("reshard", source, new, "--weights-only")[0] == 0
    assert sorted(path.name for path in new.iterdir()) == [
        "manifest.json", "model.h5", "shard_00000.h5"
    ]  # fmt: skip
    assert_equal(read(new), {"weights": make_arrays()["weights"]})
    assert command("verify", new)[0] == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_types_are_rounded_as_numpy_does(command, tmp_path: Path, dtype: str) -> None:
    arrays = make_arrays()
    new = tmp_path / "new"
    words = "reshard", save(tmp_path, 1, arrays), new, "--dtype", dtype
    status, out, _ = command(*words)
    assert status == 0 and "warning" not in out
    rounded = {
        kind: {name: x.astype(dtype) for name, x in of_kind.items()}
        for kind, of_kind in arrays.items()
    }
    assert_equal(read(new), rounded)
    assert read_manifest(new).dtype == dtype


def test_numbers_that_a_type_does_not_hold_are_counted(command, tmp_path: Path) -> None:
    x = np.array([1e6, -1e5, 1e-9, np.inf, np.nan, 0, 1], np.float32)
    source = save(tmp_path, 1, {"weights": {"a": x}, "v": {"a": x[::-1].copy()}})
    new = tmp_path / "new"
    status, out, _ = command("reshard", source, new, "--dtype", "float16")
    assert status == 0
    for kind in ("weights", "v"):
        assert f"warning: 2 numbers of {kind} became infinite\n" in out
        assert f"warning: 1 numbers of {kind} became zero\n" in out
    found = read(new)["weights"]["a"]
    assert np.array_equal(found[:4], np.float16([np.inf, -np.inf, 0, np.inf]))


def test_bfloat16_keeps_its_bits(command, tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    source = save(tmp_path, 1, {"weights": {"a": bits}}, dtype="bfloat16")
    two, wide, back = (tmp_path / name for name in ("two", "wide", "back"))
    assert command("reshard", source, two, "--shards", 2)[0] == 0
    assert command("reshard", two, wide, "--dtype", "float32")[0] == 0
    assert command("reshard", wide, back, "--dtype", "bfloat16")[0] == 0
    numbers = np.array([1.0, -2.0, np.inf, 2.0**-133], np.float32)
    for folder, dtype in ((two, "bfloat16"), (wide, "float32"), (back, "bfloat16")):
        assert read_manifest(folder).dtype == dtype
        found = read(folder)["weights"]["a"]
        assert found.dtype == np.float32
        assert np.array_equal(found, numbers) and f"{found[3]:.2e}" == "9.18e-41"
        assert command("verify", folder)[0] == 0
    for folder in (source, two, back):
        raw = b""
        for shard in read_manifest(folder).shards:
            start = shard.offsets["weights"]
            data = (folder / shard.file).read_bytes()
            raw += data[start : start + 2 * shard.elements]
        assert raw == bits.tobytes()
        with h5py.File(folder / "model.h5") as file:
            kind = file["a"].id.get_type()
            assert (kind.get_size(), kind.get_ebias()) == (2, 127)
    assert "ml_dtypes" not in sys.modules


def test_memory_stays_small(tmp_path: Path) -> None:
    x = np.arange(6 << 20, dtype=np.float32).reshape(2048, 3072)
    source = save(tmp_path, 1, {"weights": {"a": x}, "m": {"a": x}}, 2, 2)
    tracemalloc.start()
    try:
        done = reshard(source, tmp_path / "new", shards=3, dtype="bfloat16")
        assert not verify(done.folder).damages
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 2, f"{peak:,} bytes"


def test_a_newer_one_among_checkpoints_is_the_latest(command, tmp_path: Path) -> None:
    source = save(tmp_path, 5, make_arrays())
    folder = tmp_path / "checkpoints"
    for step, latest in ((3, 5), (9, 9)):
        assert command("reshard", source, folder / f"step_{step:08}")[0] == 0
        assert (folder / "latest").read_text() == f"step_{latest:08}\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["new", "--shards", "0"], "--shards 0 must be at least 1"),
        (["new", "--shards", "501"], "--shards 501 must be at most 499"),
        (["there"], "there is there already"),
        (["dead"], "dead is there already"),
        (["new.tmp"], "must not end in .tmp"),
    ],
)
def test_a_wrong_command_is_refused(command, tmp_path: Path, words, reason) -> None:
    source = save(tmp_path, 1, make_arrays())
    (tmp_path / "there").mkdir()
    (tmp_path / "dead").symlink_to("nothing")
    status, _, wrong = command("reshard", source, tmp_path / words[0], *words[1:])
    assert status == 2 and reason in wrong
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoints",
        "dead",
        "there",
    ]


def test_damage_is_named_and_nothing_is_left(command, tmp_path: Path) -> None:
    source = save(tmp_path / "run", 1, make_arrays())
    shard = read_manifest(source).shards[-1]
    flip(source / shard.file, shard.offsets["v"])
    status, _, wrong = command("reshard", source, tmp_path / "new", "--shards", 2)
    assert status == 4
    assert f"{shard.file}: dataset v is damaged" in wrong and "embedding" in wrong
    (tmp_path / "file").write_text("")
    status, _, wrong = command("reshard", source, tmp_path / "file" / "new")
    assert status == 4 and f"cannot write {tmp_path / 'file' / 'new'}: " in wrong
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_damaged_views_do_not_matter_to_a_new_one(tmp_path: Path) -> None:
    arrays = make_arrays()
    source = save(tmp_path, 1, arrays)
    (source / "model.h5").unlink()
    assert look(source).problem == "damaged: model.h5 is missing"
    assert_equal(read(reshard(source, tmp_path / "new").folder), arrays)


def test_a_failure_before_the_name_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "run", 1, make_arrays())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["mpipar.checkpoint.reshard"], "conclude", full)
    with pytest.raises(CheckpointError, match="cannot write .*No space left"):
        reshard(source, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_types_are_those_of_the_room() -> None:
    words = ["ckpt", "reshard", "a", "b", "--dtype"]
    launch = entry.read_launch({})
    for name in FLOATS:
        assert entry._parse([*words, name], launch)[0].dtype == name


def test_one_process_of_a_job_does_the_work(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path, 1, make_arrays())
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    for words in (["ls", source], ["verify", source], ["reshard", source, "new"]):
        assert command(*words) == (0, "", "")


def test_mpi_is_never_loaded_and_numpy_late(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, make_arrays())
    code = (
        "import sys\n"
        "from mpipar.cli import ckpt_ls, ckpt_reshard, ckpt_verify, main\n"
        "early = {'numpy', 'h5py', 'rich'} & set(sys.modules)\n"
        f"main(['ckpt', 'ls', {str(tmp_path)!r}])\n"
        f"main(['ckpt', 'verify', {str(tmp_path)!r}])\n"
        f"main(['ckpt', 'reshard', {str(folder)!r}, {str(tmp_path / 'new')!r}])\n"
        "print(early, {'mpi4py', 'numba', 'ml_dtypes'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set() set()", done.stderr
    shutil.rmtree(folder)
    assert not verify(tmp_path / "new").damages
