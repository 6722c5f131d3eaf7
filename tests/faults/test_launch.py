"""What happens between the launcher and the first line of a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import THREADS, Job

from mpipar.cli.launch import (
    read_launch,
    singleton_message,
    thread_settings,
    thread_warning,
    threads_per_rank,
)

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "MPI_")
NO_THREADS = dict.fromkeys((*THREADS, "BLIS_NUM_THREADS"))

RECIPE = """
[model]
family = "gpt"
layers = 1
width = 16
heads = 4
context = 16
[train]
steps = 1
global_batch = 4
"""

# A console script with one more command, called boom.
DRIVER = """
import sys, types
from mpipar.cli import entry
boom = types.ModuleType("boom")
boom.add_arguments = lambda parser: parser.add_argument("--rank", type=int)
{body}
boom.run = run
entry.COMMANDS["boom"] = "fails"
sys.modules["mpipar.cli.boom"] = boom
if __name__ == "__main__":
    sys.exit(entry.main())
"""


def clean_environment(**changes: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {**env, "PYTHONPATH": str(ROOT), **changes}


def run_alone(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run train without a launcher, in an empty folder."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    (tmp_path / "cwd").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mpipar", "train", str(recipe), "model.typo=1"]
    return subprocess.run(
        command,
        cwd=tmp_path / "cwd",
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


SLURM = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("fixed", "rank_variable"),
    [
        (SLURM, "SLURM_PROCID"),
        ({"PMI_SIZE": "4"}, "PMI_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_singletons_are_refused_once(
    tmp_path: Path, fixed: dict[str, str], rank_variable: str
) -> None:
    """A33: rank 0 says why, the others are silent, nobody writes."""
    first, second = (
        run_alone(tmp_path, **fixed, **{rank_variable: rank}) for rank in "02"
    )
    assert first.returncode == second.returncode == 2
    assert "launcher says 4, MPI says 1" in first.stderr
    assert "MPI" in first.stderr.split("MPI library (")[1]
    assert "launcher says" not in second.stderr
    assert list((tmp_path / "cwd").iterdir()) == []


def test_pmix_rank_without_a_world_is_refused(tmp_path: Path) -> None:
    """A33: MPICH refuses PMIx itself while it starts; Open MPI leaves it to us."""
    result = run_alone(tmp_path, PMIX_RANK="0")
    assert result.returncode != 0
    assert "MPI says 1" in result.stderr or "MPI_Init" in result.stderr
    assert list((tmp_path / "cwd").iterdir()) == []


def test_one_rank_in_an_sbatch_shell_is_welcome(tmp_path: Path) -> None:
    """A33: there SLURM_NTASKS=4 speaks of the job; the run gets to its recipe."""
    shell = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    result = run_alone(tmp_path, **shell, SLURM_STEP_ID="batch")
    assert "launcher says" not in result.stderr
    assert "model.typo" in result.stderr


@pytest.mark.parametrize(
    ("env", "size", "rank"),
    [
        ({}, None, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, 4, 0),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, 4, 3),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, 2, 1),
        # Hydra inside a Slurm job starts one proxy a node through srun.
        ({**SLURM, "SLURM_PROCID": "1", "PMI_SIZE": "8", "PMI_RANK": "5"}, 8, 5),
        ({"PMIX_RANK": "2"}, None, 2),
    ],
)
def test_the_nearest_launcher_is_believed(
    env: dict[str, str], size: int | None, rank: int | None
) -> None:
    launch = read_launch(env)
    assert (launch.size, launch.rank) == (size, rank)


@pytest.mark.parametrize(
    ("env", "mpi_size", "refused"),
    [
        ({}, 1, False),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, 1, False),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 4, False),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 1, True),
        ({"PMIX_RANK": "0"}, 1, True),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 1, False),
    ],
)
def test_only_a_split_world_is_refused(
    env: dict[str, str], mpi_size: int, refused: bool
) -> None:
    message = singleton_message(read_launch(env), mpi_size, "MPICH 5")
    assert (message is not None) == refused


@pytest.mark.parametrize(
    ("masks", "threads"),
    [
        ([{0, 1}], 2),
        ([{0, 1}] * 2, 1),
        ([{0, 1}] * 8, 1),
        ([set(range(16))] * 3, 5),
        # Ranks bound to cores of their own use all of those.
        ([{0, 1, 2, 3}, {4, 5, 6, 7}], 4),
        ([{0}, {1}], 1),
    ],
)
def test_cores_are_shared_among_the_ranks_of_a_node(
    masks: list[set[int]], threads: int
) -> None:
    """A34"""
    assert threads_per_rank([frozenset(mask) for mask in masks], 0) == threads


def test_thread_variables_of_the_user_win() -> None:
    """A34"""
    unset = thread_settings({}, 1)
    assert set(unset.values()) == {"1"}
    assert {*THREADS} <= set(unset)
    assert set(thread_settings({"OMP_NUM_THREADS": "4"}, 1).values()) == {"4"}
    mixed = thread_settings({"OPENBLAS_NUM_THREADS": "3"}, 1)
    assert "OPENBLAS_NUM_THREADS" not in mixed
    assert mixed["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("value", "ranks", "warned"),
    [
        ("4", 8, True),
        ("4,2", 8, True),
        ("1", 8, False),
        ("2", 1, False),
        ("", 8, False),
    ],
)
def test_too_many_threads_are_warned_of(value: str, ranks: int, warned: int) -> None:
    """A34"""
    message = thread_warning({"OMP_NUM_THREADS": value}, ranks, 2)
    assert bool(message) == warned


TELL = """
def run(args, world):
    assert "numpy" not in sys.modules
    import numpy
    from threadpoolctl import threadpool_info
    threads = {p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"}
    print(f"threads {threads}\\n", end="", flush=True)
    return 0
"""


def write_driver(tmp_path: Path, body: str) -> str:
    file = tmp_path / "driver.py"
    file.write_text(DRIVER.format(body=body))
    return str(file)


def test_eight_ranks_get_one_blas_thread_each(tmp_path: Path, job) -> None:
    """A34: the variables are set before NumPy loads."""
    driver = write_driver(tmp_path, TELL)
    cores = len(os.sched_getaffinity(0))
    env = {"PYTHONPATH": str(ROOT), **NO_THREADS}
    result = job(8, sys.executable, driver, "boom", **env)
    assert result.status == 0, result.output
    assert result.output.count(f"threads {{{max(1, cores // 8)}}}") == 8
    env["OMP_NUM_THREADS"] = str(cores)
    result = job(2, sys.executable, driver, "boom", **env)
    assert result.output.count(f"threads {{{cores}}}") == 2
    assert result.output.count("warning: OMP_NUM_THREADS") == int(cores > 1)


def check_death(result: Job, words: str) -> None:
    """All ranks are gone in time, and the guilty one has told why."""
    assert not result.late
    assert result.left == []
    assert result.seconds < 10
    assert result.status != 0
    # Open MPI may put a stray zero byte before the line.
    told = [x for x in result.output.splitlines() if "[rank 1 of 3, " in x]
    assert any("Traceback" in line for line in told), result.output
    assert any(words in line for line in told), result.output


FAULTS = {
    "raises": 'raise ValueError("planted")',
    "agrees_alone": 'raise MpiparError("planted")',
    "exits": 'sys.exit("planted")',
    "import": "import planted_module",
    "thread": """
        import threading
        def fail(): raise ValueError("planted")
        threading.Thread(target=fail).start()""",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_rank_ends_all(tmp_path: Path, job, fault: str) -> None:
    """A24: the others wait in a barrier."""
    body = (
        "from mpipar.errors import MpiparError\n"
        "def run(args, world):\n    if world.rank == args.rank:\n        "
        f"{FAULTS[fault].strip()}\n    world.Barrier()\n"
    )
    driver = write_driver(tmp_path, body)
    result = job(
        3, sys.executable, driver, "boom", "--rank=1", timeout=20, PYTHONPATH=str(ROOT)
    )
    check_death(result, "planted")


@pytest.mark.parametrize("script", [False, True], ids=["module", "console script"])
def test_a_failing_rank_ends_all_however_it_is_started(
    tmp_path: Path, job, script: bool
) -> None:
    """A24: the fault is planted by sitecustomize, so the real entry points run."""
    console = Path(sys.executable).with_name("mpipar")
    if script and not console.exists():
        pytest.skip("mpipar is not installed in this environment")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mpipar.train':\n"
        "            from mpi4py import MPI\n"
        "            if MPI.COMM_WORLD.rank == 1: raise ImportError('planted')\n"
        "            MPI.COMM_WORLD.Barrier()\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = [str(console)] if script else [sys.executable, "-m", "mpipar"]
    result = job(
        3,
        *words,
        "train",
        str(tmp_path / "recipe.toml"),
        "train.global_batch=3",
        timeout=20,
        cwd=tmp_path,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    check_death(result, "planted")


def test_an_agreed_error_is_printed_once_and_aborts_nobody(tmp_path: Path, job) -> None:
    body = (
        "from mpipar.errors import DataError\n"
        "def run(args, world):\n"
        "    error = DataError('planted')\n"
        "    error.agreed = True\n"
        "    raise error\n"
    )
    driver = write_driver(tmp_path, body)
    result = job(3, sys.executable, driver, "boom", PYTHONPATH=str(ROOT))
    assert result.status == 2
    assert result.output.count("mpipar: planted") == 1
    assert "Traceback" not in result.output


def test_a_wrong_recipe_is_told_once(tmp_path: Path, job) -> None:
    words = [sys.executable, "-m", "mpipar", "train", str(tmp_path / "none.toml")]
    result = job(3, *words, PYTHONPATH=str(ROOT))
    assert result.status == 2
    assert result.output.count("none.toml") == 1
    (tmp_path / "none.toml").write_text(RECIPE)
    result = job(3, *words, "model.typo=1", PYTHONPATH=str(ROOT))
    assert result.status == 2
    assert result.output.count("model.typo = 1 is not a known key") == 1


def test_help_is_light_and_a_wrong_command_is_refused() -> None:
    base = [sys.executable, "-X", "importtime", "-m", "mpipar"]

    def run(*words: str) -> subprocess.CompletedProcess:
        env = clean_environment()
        return subprocess.run(
            [*base, *words], env=env, capture_output=True, text=True, timeout=30
        )

    for words in (["--help"], ["train", "--help"], ["--version"]):
        result = run(*words)
        assert result.returncode == 0
        loaded = {x.rpartition("|")[2].strip() for x in result.stderr.splitlines()}
        assert not loaded & {
            "numpy",
            "mpi4py",
            "mpi4py.MPI",
            "h5py",
            "pydantic",
            "rich",
        }
    result = run("bogus")
    assert result.returncode == 2
    assert "invalid choice" in result.stderr
