"""Job scripts and the launch lines of the READMEs: bash reads them, and their recipes
are none that mpipar refuses."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mpipar.config import find_recipe, read_recipe

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ROOT / ".ci" / "run",
    ROOT / "tests" / "cluster" / "packages.sh",
    *sorted(ROOT.glob("jobs/*.sh")),
    *sorted(ROOT.glob("jobs/*.sbatch")),
]
# All launch lines are for so many ranks, where -n does not say another number.
RANKS = 8


def launches(file: Path) -> list[tuple[int, list[str]]]:
    """Ranks and recipe words of each `mpipar train` in a script or a README."""
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    arrays = dict(re.findall(r"^(\w+)=\((.*)\)$", text, re.MULTILINE))
    text = re.sub(r'"\$\{(\w+)\[@\]\}"', lambda m: arrays.get(m[1], ""), text)
    text = text.replace("$root", str(ROOT))
    found = []
    for before, after in re.findall(r"([^`\n]*)mpipar train ([^`\n]+)", text):
        ranks = re.search(r" -n (\d+)", before)
        words = re.split(r" --\w", after)[0]
        found.append((int(ranks[1]) if ranks else RANKS, shlex.split(words)))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_bash_reads_a_script(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("jobs/slurm.sbatch", 1),
        ("jobs/pbs.sh", 1),
        ("jobs/quickstart.sh", 1),
        ("jobs/README.md", 12),
        ("hostfiles/README.md", 4),
    ],
)
def test_what_is_to_be_trained_is_a_recipe(name: str, count: int) -> None:
    found = launches(ROOT / name)
    assert len(found) == count
    for ranks, (recipe, *changes) in found:
        file = find_recipe(recipe)
        assert read_recipe(file.read_text(), changes, file.parent, ranks=ranks)


def test_a_wrong_launch_line_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_text("words=(small parallel.tensro=2)\nmpipar train \\\n"
                    '    "${words[@]}" --out runs/x\n')  # fmt: skip
    assert launches(file) == [(RANKS, ["small", "parallel.tensro=2"])]
