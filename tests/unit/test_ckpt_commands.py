"""mpipar ckpt ls and verify: one process, no MPI."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import saved
from ckpt_cases import (
    KINDS,
    flip,
    make_arrays,
    make_command,
    save,
    shrink_blocks,
)  # fmt: skip

from mpipar.checkpoint import read_manifest, verify
from mpipar.checkpoint.manifest import encode


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    return make_command(capsys, monkeypatch)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_blocks(monkeypatch)


# Listing


def test_all_checkpoints_of_a_run_are_listed(command, tmp_path: Path) -> None:
    arrays = make_arrays()
    for step in (10, 20, 30, 40):
        save(tmp_path, step, arrays)
    folder = tmp_path / "checkpoints"
    flip(folder / "step_00000010" / "manifest.json", 100)
    (folder / "step_00000020" / "shard_00001.h5").unlink()
    os.truncate(folder / "step_00000020" / "model.h5", 5)
    (folder / "step_00000030" / "manifest.json").unlink()
    (folder / "step_00000050.4f1d.tmp").mkdir()
    (folder / ".hidden").mkdir()
    report = tmp_path / "ls.json"
    for path in (tmp_path, folder, folder / "latest"):
        status, out, _ = command("ls", path, "--json", report)
        assert status == 0
        lines = out.splitlines()
        assert lines[0].split()[:3] == ["folder", "step", "tokens"]
        assert len(lines) == 6 and max(map(len, lines)) < 400
        assert "damaged: " in lines[1] and "checksum is wrong" in lines[1]
        assert "damaged: shard_00001.h5 is missing; model.h5 has 5 bytes" in lines[2]
        assert "incomplete: manifest.json is missing" in lines[3]
        assert lines[4].split()[:5] == ["step_00000040", "40", "49,360", "0.1", "MB"]
        assert "2026-11-30T00:00:00" in lines[4] and "tp 2 x dp 2" in lines[4]
        assert lines[4].rstrip().endswith("complete")
        assert "incomplete: being written, or left by a run that died" in lines[5]
    found = json.loads(report.read_text())["checkpoints"]
    assert [e["complete"] for e in found] == [False, False, False, True, False]
    assert [e["step"] for e in found] == [10, 20, 30, 40, 50]
    assert found[3]["bytes"] == sum(
        f.stat().st_size for f in (folder / "step_00000040").iterdir()
    )


def test_one_checkpoint_shows_its_arrays(command, tmp_path: Path) -> None:
    folder, report = save(tmp_path, 7, make_arrays()), tmp_path / "ls.json"
    for path in (folder, folder / "model.h5"):
        status, out, _ = command("ls", path, "--json", report)
        assert status == 0 and out.startswith(f"{folder}: complete\n")
        row = next(line for line in out.splitlines() if "cube" in line)
        assert row.split() == [
            "blocks.10.cube", "(4,", "3,", "6)", "weights", "m", "v", "float32"
        ]  # fmt: skip
    found = json.loads(report.read_text())["checkpoint"]
    assert found["recipe"] == "[train]\n" and found["tokens"] == 7 * 1234
    assert found["arrays"][2] == {
        "name": "blocks.0.norm1.gain", "shape": [11], "kinds": KINDS, "dtype": "float32"
    }  # fmt: skip


def test_a_checkpoint_of_a_saver_is_complete_and_sound(command, tmp_path: Path) -> None:
    assert saved.save(tmp_path, 3).error is None
    line = command("ls", tmp_path)[1].splitlines()[1]
    assert line.startswith("step_00000003") and line.rstrip().endswith("complete")
    assert command("verify", tmp_path)[0] == 0


def test_text_of_strangers_is_shown_as_text(command, tmp_path: Path) -> None:
    evil = "[red]a[/red] :smile: \x1b[31m\u202e\n"
    folder = save(tmp_path, 1, make_arrays(), layout=evil, run=evil, saved=evil)
    (folder / "\x1b[2J[b]\udcff").write_text("")
    for words in (("ls", tmp_path), ("ls", folder), ("verify", folder)):
        status, out, _ = command(*words)
        assert status == 0 and "\x1b" not in out and "\u202e" not in out
        shown = r"\x1b[2J[b]\udcff does not belong"
        if words[0] == "ls":
            shown = r"[red]a[/red] :smile: \x1b[31m\u202e\n"
        assert shown in out


@pytest.mark.parametrize("name", ["ls", "verify", "reshard"])
def test_nothing_there_is_a_wrong_command(command, tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "model.h5").write_text("")
    target = [tmp_path / "new"] if name == "reshard" else []
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "none"):
        status, out, wrong = command(name, path, *target)
        assert (status, out) == (2, "") and str(path) in wrong
    if not target:
        save(tmp_path, 1, make_arrays())
        status, _, wrong = command(name, tmp_path, "--json", "/no/such/x")
        assert status == 2 and "cannot write --json /no/such/x" in wrong


# Verifying


def test_a_sound_checkpoint_passes(command, tmp_path: Path) -> None:
    save(tmp_path, 1, make_arrays())
    newest, report = save(tmp_path, 2, make_arrays()), tmp_path / "verify.json"
    status, out, _ = command("verify", tmp_path, "--json", report)
    assert status == 0 and out.startswith(f"{newest} is sound: 7 files, ")
    found = json.loads(report.read_text())
    assert found["sound"] and found["damages"] == found["strays"] == []


def test_any_flipped_byte_in_any_file_is_found(small_blocks, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = save(tmp_path, 1, make_arrays())
    assert not verify(folder).damages
    for file in sorted(folder.iterdir()):
        size = file.stat().st_size
        places = {0, 1, 8, size - 2, size - 1, *rng.integers(0, size, 25).tolist()}
        for place in sorted(places):
            bits = int(rng.integers(1, 256))
            flip(file, place, bits)
            damages = verify(folder).damages
            assert damages, f"{file.name} byte {place} xor {bits}"
            assert {damage.file for damage in damages} == {file.name}
            flip(file, place, bits)
    assert not verify(folder).damages


def test_another_end_of_line_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, make_arrays())
    file = folder / "manifest.json"
    flip(file, file.stat().st_size - 1, ord("\n") ^ ord("\r"))
    assert [damage.file for damage in verify(folder).damages] == ["manifest.json"]


def test_all_damages_are_named(command, small_blocks, tmp_path: Path) -> None:
    folder, report = save(tmp_path, 1, make_arrays()), tmp_path / "verify.json"
    first, second = read_manifest(folder).shards[:2]
    token, gain = (first.regions[i] for i in (0, 2))
    skipped = sum(region[3] - region[2] for region in first.regions[:2])
    assert (token[0], gain[0]) == ("embedding.token.weight", "blocks.0.norm1.gain")
    for block in (0, 1, 3):
        flip(folder / first.file, first.offsets["weights"] + 64 * block + 5)
    flip(folder / first.file, first.offsets["v"] + 4 * skipped)
    flip(folder / second.file, 0)
    (folder / "shard_00002.h5").unlink()
    os.truncate(folder / "shard_00003.h5", 100)
    flip(folder / "optimizer.h5", 10)
    (folder / "model.h5").unlink()
    (folder / "model.h5").symlink_to("optimizer.h5")
    (folder / "notes.txt").write_text("")
    status, out, _ = command("verify", tmp_path, "--json", report)
    assert status == 1 and "has 11 damages:" in out.splitlines()[0]
    found = json.loads(report.read_text())
    assert not found["sound"] and found["strays"] == ["notes.txt"]
    assert [(d["file"], d["dataset"]) for d in found["damages"]] == [
        ("shard_00000.h5", "weights"), ("shard_00000.h5", "weights"),
        ("shard_00000.h5", "v"), ("shard_00001.h5", ""), ("shard_00002.h5", ""),
        ("shard_00003.h5", ""), ("shard_00003.h5", "weights"),
        ("shard_00003.h5", "m"), ("shard_00003.h5", "v"), ("model.h5", ""),
        ("optimizer.h5", ""),
    ]  # fmt: skip
    assert all(d["text"] in out and d["file"] in d["text"] for d in found["damages"])
    one, two, three = found["damages"][:3]
    assert "weights is damaged in bytes 0 to 128, which hold embedding" in one["text"]
    assert "bytes 192 to 256" in two["text"]
    assert one["parameters"] == ["embedding.token.weight"]
    assert "blocks.0.norm1.gain" in three["parameters"]
    assert found["damages"][3]["parameters"] == [region[0] for region in second.regions]
    assert "warning: notes.txt does not belong to the checkpoint" in out


def test_a_hole_in_an_array_is_found(command, tmp_path: Path) -> None:
    arrays = {"weights": {"a": np.zeros((4, 6), np.float32)}}
    folder = save(tmp_path, 1, arrays)
    manifest = read_manifest(folder)
    shards = [
        shard.model_copy(update={"regions": manifest.shards[0].regions})
        for shard in manifest.shards
    ]
    broken = manifest.model_copy(update={"shards": shards})
    (folder / "manifest.json").write_text(encode(broken))
    status, out, _ = command("verify", folder)
    assert status == 1 and "the regions of a do not have each of its elements" in out
    status, _, wrong = command("reshard", folder, tmp_path / "new")
    assert status == 4 and "the regions of a do not have" in wrong
