"""What the doctor says of made-up ranks, nodes and files."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mpipar.cli.binding import Place, judge_binding
from mpipar.cli.cgroup import read_cgroup
from mpipar.cli.facts import Facts
from mpipar.cli.finding import by_node, of_ranks, some
from mpipar.cli.findings import judge
from mpipar.cli.folder import Trial, judge_folder
from mpipar.cli.gpus import Gpus, judge_gpus
from mpipar.cli.launch import NO_LAUNCHER, Launch
from mpipar.cli.limits import Limits, judge_limits, judge_memory
from mpipar.cli.mpi_build import MpiBuild, judge_build
from mpipar.cli.patience import Patience, within
from mpipar.comm.cuda_aware import loaded_libraries

GIB = 1 << 30
SLURM = Launch("Slurm", "SLURM_NTASKS", 2, 0)
LIMITS = Limits(16 * GIB, None, None, 4096, None, False)
BUILD = MpiBuild("4.1.2", "mpich", (5, 0), (5, 0), ("/x/libmpi.so.12",), False, True)
NO_GPU = Gpus(0, "", None, (), "")
GPU = Gpus(2, "580.1", "cupy-cuda13x 14.0", ("H200", "H200"), "")
FACTS = Facts(
    host="a", python="3.11.7", cores=frozenset({0}), node_cores=2, quota=None,
    mpi="MPICH 5.0.2", mpi_size=2, build=BUILD, numpy="2.4.6",
    blas=(("openblas", 1),), numba="numba 0.68", bf16_obstacle=None, h5py="3.16",
    hdf5="2.0", file_locking="", shm_free=8 * GIB, gpus=NO_GPU, limits=LIMITS,
)  # fmt: skip
OTHER = replace(FACTS, cores=frozenset({1}))


def findings(*facts: Facts) -> dict:
    return {found.name: found for found in judge(facts, NO_LAUNCHER)}


def place(rank: int, *cores: int, host="a", node=4, threads=1) -> Place:
    return Place(rank, host, frozenset(cores), node, threads)


def test_all_is_well_with_usual_facts() -> None:
    found = findings(FACTS, OTHER)
    assert {f.state for f in found.values()} == {"ok"}
    assert not any(f.advice for f in found.values())
    names = {"Python", "MPI", "ABI", "cores", "binding", "BLAS", "kernels", "bf16"}
    assert set(found) == names | {"memory", "limits", "/dev/shm", "GPU", "HDF5"}


@pytest.mark.parametrize(
    ("name", "state", "change", "text"),
    [
        ("Python", "bad", {"python": "3.12.1"}, "3.11.7 (a) / 3.12.1 (b)"),
        ("MPI", "bad", {"mpi": "MPICH 4.3.0"}, "MPICH 4.3.0 (b)"),
        ("HDF5", "bad", {"hdf5": "1.14"}, "HDF5 1.14 (b)"),
        ("nodes", "warn", {"node_cores": 64}, "cores: 2 (a) / 64 (b)"),
        ("nodes", "ok", {}, "2 nodes; ranks on each: 1; cores: 2"),
        ("/dev/shm", "bad", {"shm_free": 64 << 20}, "0.1 GiB free on b"),
        ("cores", "warn", {"quota": 0.5}, "the time of 0.5 of 2 cores"),
        ("BLAS", "warn", {"blas": (("mkl", 8),)}, "8 threads on 1 core of b"),
    ],
)
def test_a_node_that_is_not_like_the_others_is_named(name, state, change, text) -> None:
    found = findings(FACTS, replace(OTHER, host="b", **change))[name]
    assert found.state == state and text in found.text
    assert bool(found.advice) == (state != "ok")


def test_unequal_numbers_of_ranks_are_told() -> None:
    nodes = findings(FACTS, OTHER, replace(FACTS, host="b"))["nodes"]
    assert nodes.state == "warn" and "ranks on each: 2 (a) / 1 (b)" in nodes.text
    assert "--ntasks-per-node" in nodes.advice
    assert [node["ranks"] for node in nodes.details] == [2, 1]


@pytest.mark.parametrize(
    ("places", "state", "text"),
    [
        ([place(0, 0, 1, 2, 3)], "ok", "no rank is bound"),
        ([place(0, 0, 1), place(1, 2, 3)], "ok", "each rank has 2 cores"),
        ([place(0, 0), place(1, 1, 2, 3)], "ok", "each rank has 1 core to 3"),
        ([place(r, 0, 1, node=2) for r in range(4)], "ok", "no rank is bound"),
        ([place(0, 0), place(1, 0)], "bad", "share core 0 of a, which has 4"),
        ([place(0, 0), place(1, 0), place(2, 1)], "bad", "ranks 0, 1 share core 0"),
        ([place(0, 0, 1, threads=4), place(1, 2, 3)], "warn", "rank 0: 4 threads on 2"),
        ([place(0, 0), place(1, 1)], "warn", "ranks may use 2 of 4 cores of a"),
        ([place(0, 0, node=1), place(1, 0, 1, host="b", node=2)], "ok", "no rank"),
        ([place(0, 3, host="b"), place(1, 3, host="b")], "bad", "core 3 of b"),
    ],
)
def test_cores_of_ranks_are_judged(places, state, text) -> None:
    found = judge_binding(places, "MPICH 5.0.2", NO_LAUNCHER)
    assert found.state == state and text in found.text
    assert [detail["rank"] for detail in found.details] == list(range(len(places)))


@pytest.mark.parametrize(
    ("mpi", "launch", "words"),
    [
        ("MPICH 5.0.2", NO_LAUNCHER, "mpiexec -bind-to core:N"),
        ("Open MPI v5.0.11", NO_LAUNCHER, "--map-by slot:pe=N"),
        ("MPICH 5.0.2", SLURM, "srun --cpus-per-task=N --cpu-bind=cores"),
    ],
)
def test_how_to_bind_depends_on_the_launcher(mpi, launch, words) -> None:
    assert words in judge_binding([place(0, 0), place(1, 0)], mpi, launch).advice


@pytest.mark.parametrize(
    ("library", "change", "state", "text"),
    [
        ("MPICH 5.0.2", {}, "ok", "for the MPICH ABI, /x/libmpi.so.12, not CUDA-aware"),
        ("Intel MPI Library 2021", {}, "ok", "the MPICH ABI"),
        ("Open MPI v5.0.11", {"abi": "mpiabi", "cuda": True}, "ok", ", CUDA-aware"),
        ("Open MPI v5.0.11", {}, "bad", "but the library is Open MPI"),
        ("MPICH 4.0", {"runs": (4, 0)}, "warn", "MPI 5.0, but the library has MPI 4.0"),
        (
            "MPICH 5.0.2",
            {"files": ("/a/libmpi.so", "/libmpi.so.1")},
            "bad",
            "/libmpi.so.1",
        ),
        ("MPICH 5.0.2", {"all_threads": False}, "warn", "MPI_THREAD_MULTIPLE"),
    ],
)
def test_the_library_must_be_what_mpi4py_was_built_for(
    library, change, state, text
) -> None:
    found = judge_build([("a", library, replace(BUILD, **change))])
    assert found.state == state and text in found.text
    assert bool(found.advice) == (state != "ok")


def test_libraries_are_found_among_mapped_files(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 08:01 42                 {}\n"
    files = ("/usr/lib/libmpi.so.12.3", "/my mpi/libmpi.so.40", "/x/libmpicxx.so", "")
    maps.write_text("".join(line.format(file) for file in files) * 2)
    assert loaded_libraries(maps) == ("/my mpi/libmpi.so.40", "/usr/lib/libmpi.so.12.3")
    assert loaded_libraries(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("seen", "state", "text"),
    [
        ([NO_GPU], "ok", "none: runs on CPUs"),
        ([GPU, GPU], "ok", "2 x H200, driver 580.1, cupy-cuda13x 14.0"),
        ([GPU] * 3, "warn", "3 ranks share 2 GPUs of a"),
        ([replace(GPU, cupy=None, names=())], "warn", "CuPy is not installed"),
        ([replace(GPU, names=(), error="no driver")], "bad", "no driver"),
        ([replace(NO_GPU, cupy="cupy 14.0")], "warn", "no GPU seen"),
        ([GPU, replace(GPU, driver="550.1")], "warn", "550.1"),
    ],
)
def test_gpus_are_judged(seen, state, text) -> None:
    found = judge_gpus([("a", gpus) for gpus in seen])
    assert found.state == state and text in found.text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"files": 256}, "ulimit -n 1024"),
        ({"address": GIB}, "ulimit -v unlimited"),
        ({"file_bytes": GIB}, "ulimit -f unlimited"),
        ({"locked": 1 << 16, "infiniband": True}, "ulimit -l unlimited"),
    ],
)
def test_limits_that_are_too_low_are_told_with_the_command(change, word) -> None:
    assert judge_limits([("a", LIMITS)]).state == "ok"
    found = judge_limits([("a", LIMITS), ("b", replace(LIMITS, **change))])
    assert found.state == "warn" and word in found.advice and "(b)" in found.text


def test_memory_is_shared_by_the_ranks_of_a_node() -> None:
    assert "8.0 GiB free a rank" in judge_memory([("a", LIMITS)] * 2).text
    small = replace(LIMITS, memory=GIB)
    found = judge_memory([("a", LIMITS), *[("b", small)] * 4])
    assert found.state == "warn" and "0.2 GiB free a rank on b" in found.text


def test_limits_of_control_groups_are_read(tmp_path: Path) -> None:
    two = {"memory.max": "max", "job/memory.max": "4096",
           "job/cpu.max": "150000 100000", "cpuset.cpus.effective": "0-3,8",
           "job/step/cpuset.cpus.effective": "1-2",
           "cpu.max": "max 100000"}  # fmt: skip
    one = {"memory/memory.limit_in_bytes": str((1 << 63) - 4096),
           "memory/job/memory.limit_in_bytes": "8192",
           "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
           "cpuset/cpuset.effective_cpus": "0-1"}  # fmt: skip
    for folder, files in (("two", two), ("one", one)):
        for name, text in files.items():
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
    proc = tmp_path / "proc"
    proc.write_text("4:memory:/job\n3:cpuset:/\n1:cpu,cpuacct:/\n0::/job/step\n")
    new = read_cgroup(proc, tmp_path / "two")
    assert (new.memory, new.quota, new.cores) == (4096, 1.5, {1, 2})
    old = read_cgroup(proc, tmp_path / "one")
    assert (old.memory, old.quota, old.cores) == (8192, None, {0, 1})
    nothing = read_cgroup(tmp_path / "none", tmp_path / "none")
    assert (nothing.memory, nothing.quota, nothing.cores) == (None, None, None)


TRIAL = Trial("a", "/runs", "nfs4", free=24 * GIB, free_files=10**6)


def test_a_folder_that_works_and_its_room_are_told() -> None:
    folder, disk = judge_folder([TRIAL, TRIAL], "")
    assert (folder.state, disk.state) == ("ok", "ok")
    assert "lock" in folder.text and "/runs (nfs4)" in folder.text
    assert "24.0 GiB free, for a checkpoint of 2.15 · 10⁹ weights" in disk.text


@pytest.mark.parametrize(
    ("change", "name", "state", "text", "advice"),
    [
        ({"failed": "No space left"}, "folder", "bad", "No space left (rank 1 on b)",
         "--out"),
        ({"hidden": True, "free": None}, "folder", "bad", "rank 1 on b cannot see",
         "all nodes share"),
        ({"lock": "No locks available"}, "folder", "warn", "No locks available",
         "HDF5_USE_FILE_LOCKING=FALSE"),
        ({"free": GIB // 2}, "disk", "warn", "0.5 GiB free", "checkpoint.keep"),
        ({"free_files": 7}, "disk", "bad", "room for 7 files more", "inodes"),
    ],
)  # fmt: skip
def test_what_fails_in_a_folder_is_told(change, name, state, text, advice) -> None:
    trials = [TRIAL, replace(TRIAL, host="b", **change)]
    found = {finding.name: finding for finding in judge_folder(trials, "")}[name]
    assert found.state == state and text in found.text and advice in found.advice
    assert name == "disk" or [detail["host"] for detail in found.details] == ["a", "b"]


def test_no_locks_are_no_fault_where_hdf5_asks_for_none() -> None:
    trial = replace(TRIAL, lock="No locks available")
    assert judge_folder([trial], "FALSE")[0].state == "ok"
    assert judge_folder([trial], "TRUE")[0].state == "warn"


def test_no_room_is_told_where_nothing_was_found_out() -> None:
    failed = Trial("a", "/runs", failed="the file system does not respond")
    assert [finding.name for finding in judge_folder([failed], "")] == ["folder"]


def test_long_lists_are_cut() -> None:
    assert some("abcde") == "a, b, c, d, e"
    assert some("abcdef") == "a, b, c, d and 2 more"
    assert of_ranks([3]) == "rank 3" and of_ranks([3, 4]) == "ranks 3, 4"
    assert by_node([("a", 1), ("b", 1)]) == "1"
    assert by_node([("a", 1), ("b", 2), ("c", 2), ("c", 2)]) == "1 (a) / 2 (b, c)"


def test_what_never_returns_is_given_up() -> None:
    ever = threading.Event()
    with pytest.raises(TimeoutError, match="no answer in 0.1 s"):
        within(0.1, ever.wait)
    ever.set()
    assert within(60, lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)


class World:
    """Stands for MPI's; notes that it was aborted."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def Abort(self, status: int) -> None:  # noqa: N802
        self.status = status
        self.aborted.set()


def test_a_stage_that_takes_too_long_ends_the_job(capsys) -> None:
    world = World()
    with Patience(world, "a", 0.1) as patience:
        patience.begin("messages", "Check cables.")
        assert world.aborted.wait(60)
    assert world.status == 4
    word = "[rank 1 of 2, a] mpipar doctor: bad: messages: no answer in 0.1 s. Check"
    assert word in capsys.readouterr().err


def test_a_stage_that_ends_in_time_ends_nothing() -> None:
    world = World()
    with Patience(world, "a", 600) as patience:
        patience.begin("messages", "")
        patience.begin("others", "")
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(60)
            assert not thread.is_alive()
    assert not world.aborted.is_set()
