"""mpipar schedule prints, writes and refuses; it never touches MPI."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpipar.cli import entry

SMALL = ("--stages", "4", "--micro-batches", "8")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the command; return its exit status, output and complaints."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        status = entry.main(["schedule", *words])
        return status, *capsys.readouterr()

    return run


def test_it_prints_chart_and_numbers(command):
    status, out, _ = command("1f1b", *SMALL)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "1f1b: stages 4, micro-batches 8, chunks per stage 1"
    assert lines[5].startswith("s3 .   .   .   F0  BW0 --  F1  BW1 --")
    assert lines[7:10] == [
        "makespan  33",
        "ideal     24",
        "bubble    0.2727 of the makespan, 0.375 of the ideal",
    ]
    assert [line.split() for line in lines[-4:]] == [
        ["0", "9", "9", "4", "8", "0"],
        ["1", "9", "6", "3", "8", "8"],
        ["2", "9", "3", "2", "8", "8"],
        ["3", "9", "0", "1", "0", "8"],
    ]


def test_it_writes_the_actions_as_text_that_it_reads(command, tmp_path: Path):
    path = tmp_path / "mine.txt"
    status, shown = command("zb-v", *SMALL, "--text", str(path))[:2]
    again = command(str(path))
    assert (status, again[0]) == (0, 0)
    assert again[1].splitlines()[1:] == shown.splitlines()[1:]


def test_it_writes_json(command, tmp_path: Path):
    path = tmp_path / "out.json"
    assert command("interleaved", *SMALL, "--chunks", "4", "--json", str(path))[0] == 0
    found = json.loads(path.read_text())
    assert (found["makespan"], found["ideal"]) == (26.25, 24)
    assert found["bubble"] == pytest.approx(2.25 / 26.25)
    assert found["bubble_ratio"] == pytest.approx(2.25 / 24)
    assert found["peak_in_flight"] == [4.75, 4.25, 3.75, 3.25]
    assert len(found["actions"]) == 4 and found["actions"][0][0] == "F0.0"
    assert found["messages"][3] == {"activations": 24, "gradients": 32}


def test_costs_latency_and_batches_count(command, tmp_path: Path):
    path = tmp_path / "out.json"
    words = ("2bw", *SMALL, "--batches", "3", "--costs", "2,2,2", "--json", str(path))
    assert command(*words)[0] == 0
    assert json.loads(path.read_text())["makespan"] == 2 * (3 * 8 * 3 + 9)
    words = ("1f1b", "--stages", "8", "--micro-batches", "64", "--latency", "0.25")
    assert "makespan  244\n" in command(*words)[1]


def test_it_reads_what_it_wrote(command, tmp_path: Path):
    path, found = tmp_path / "mine.csv", tmp_path / "out.json"
    path.write_text("# placement: vee\nF0.0,F0.1,BW0.1,BW0.0\n")
    assert command(str(path), "--json", str(found))[0] == 0
    assert json.loads(found.read_text())["placement"] == "vee"
    status, _, wrong = command(str(path), *SMALL)
    assert status == 2
    assert f"--stages 4 differs from the 1 of {path}; leave it out" in wrong
    assert "--micro-batches 8 differs from the 1" in wrong


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["1f1b"], ["--stages is missing", "--micro-batches is missing"]),
        (["1f1c", *SMALL], ["none of the schedules naive, ", "no file either"]),
        (
            ["zb-v", "--chunks", "3", "--costs", "1,x", "--latency", "-1"],
            ["--stages", "--micro", "chunks = 3 ", "--costs 1,x", "--latency -1"],
        ),
        (["1f1b", *SMALL, "--chunks", "0"], ["--chunks 0 must be at least 1"]),
        (["1f1b", *SMALL, "--costs", "1,2,-3"], ["--costs 1,2,-3 must be three"]),
        (["1f1b", *SMALL, "--latency", "nan"], ["--latency nan must be"]),
        (["1f1b", *SMALL, "--json", "/no/such/x"], ["cannot write --json /no/such/x"]),
        (["/", *SMALL], ["/ cannot be read"]),
    ],
)
def test_it_refuses_with_all_reasons(command, words: list[str], reasons: list[str]):
    status, _, wrong = command(*words)
    assert status == 2
    lines = wrong.splitlines()[1:]
    assert len(lines) == len(reasons), wrong
    assert all(r in line for r, line in zip(reasons, lines, strict=True)), wrong


def test_a_file_that_hangs_is_refused(command, tmp_path: Path):
    path = tmp_path / "mine.txt"
    path.write_text("F0 BW0 F1 BW1\nF0 F1 BW0 BW1\n")
    status, _, wrong = command(str(path))
    assert status == 2 and f"{path}: stage 0 waits for ever" in wrong


def test_one_process_of_a_job_speaks(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert command("1f1b", *SMALL) == (0, "", "")
    assert command("1f1c", *SMALL) == (2, "", "")


def test_a_missing_matplotlib_is_named(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "out.png"
    status, _, wrong = command("1f1b", *SMALL, "--png", str(path))
    assert status == 2 and 'pip install "mpipar[report]"' in wrong
    assert not path.exists()


def test_it_draws_a_picture(command, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert command("zb-v", *SMALL, "--png", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_neither_mpi_nor_numpy_is_loaded():
    code = (
        "import sys; from mpipar.cli import main; "
        "status = main(['schedule', '1f1b', '--stages', '2', '--micro-batches', '2']); "
        "print(status, {'mpi4py', 'numpy', 'mpipar.comm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 set()", done.stderr
