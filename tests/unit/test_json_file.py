"""--json is tried before the work begins, whatever the command."""

import argparse
import os
from pathlib import Path

import pytest

from mpipar.cli.entry import main
from mpipar.cli.json_file import check_json, write_json
from mpipar.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is a folder"),
        ("none/x.json", "there is no folder"),
        ("file/x.json", "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_told_with_the_reason(tmp_path, name, reason) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(ConfigError, match=f"cannot write --json {path}: {reason}") as e:
        check_json(argparse.Namespace(json=path))
    assert e.value.agreed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="permission denied"):
        check_json(argparse.Namespace(json=tmp_path / "x.json"))


@pytest.mark.parametrize("given", [{}, {"json": None}, {"json": Path("new.json")}])
def test_a_check_leaves_nothing(tmp_path, monkeypatch, given) -> None:
    monkeypatch.chdir(tmp_path)
    check_json(argparse.Namespace(**given))
    assert list(tmp_path.iterdir()) == []


def test_what_fails_after_the_check_is_told_too() -> None:
    check_json(argparse.Namespace(json=Path("/dev/full")))
    with pytest.raises(ConfigError, match="cannot write --json /dev/full: .*No space"):
        write_json(Path("/dev/full"), {})


@pytest.mark.parametrize(
    "words", [["bench", "peers", "small"], ["ckpt", "ls", "none"], ["schedule", "1f1b"]]
)
def test_commands_outside_of_mpi_are_checked_as_well(words, capsys) -> None:
    assert main([*words, "--json", "/no/such/x"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 2 and "cannot write --json /no/such/x: " in told
