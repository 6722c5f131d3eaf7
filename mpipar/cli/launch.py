"""What the launcher's variables and the core masks say. Neither MPI nor NumPy here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# OMP_NUM_THREADS first: every BLAS falls back to it when its own variable is unset.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)

# Exit status of a job in which a rank failed.
FAILED = 4
# A launcher may drop what it has not read from a rank's stderr when the job is aborted.
LAST_WORDS_S = 0.25

# The step ids that Slurm gives to a batch script and to an interactive shell.
_SLURM_SHELLS = {"", "batch", "interactive", "4294967291", "4294967290"}


@dataclass(frozen=True)
class Launch:
    """What the nearest launcher claims about this process; None where it is silent."""

    name: str
    variable: str
    size: int | None
    rank: int | None

    @property
    def speaks(self) -> bool:
        """True for the one process of a job that prints: rank 0 or unknown."""
        return not self.rank


NO_LAUNCHER = Launch("no launcher", "", None, None)


def read_launch(env: Mapping[str, str]) -> Launch:
    """Read the launcher's claim; the launcher nearest to the process wins.

    An mpiexec inside a Slurm job starts its ranks through srun, so its own variables
    come before Slurm's.
    """
    for name, size, rank in (
        ("Open MPI's mpiexec", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("a PMI launcher", "PMI_SIZE", "PMI_RANK"),
    ):
        if env.get(size):
            return Launch(name, size, _number(env, size), _number(env, rank))
    if _is_slurm_task(env):
        size = (
            "SLURM_STEP_NUM_TASKS"
            if env.get("SLURM_STEP_NUM_TASKS")
            else ("SLURM_NTASKS")
        )
        return Launch("Slurm", size, _number(env, size), _number(env, "SLURM_PROCID"))
    if env.get("PMIX_RANK"):
        return Launch("a PMIx launcher", "PMIX_RANK", None, _number(env, "PMIX_RANK"))
    return NO_LAUNCHER


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """True in a process that srun started, not in the shell of a batch job."""
    if env.get("SLURM_STEP_ID", "") not in _SLURM_SHELLS:
        return True
    return bool(_number(env, "SLURM_PROCID"))


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None


def singleton_message(launch: Launch, mpi_size: int, library: str) -> str | None:
    """Return why this process must not go on alone, or None when all is well.

    Ranks that MPI did not join each see a world of one, and would all write the same
    files. A PMIx launcher tells no size, so one that MPI did not notice is refused.
    """
    if mpi_size > 1 or launch.size == 1:
        return None
    if launch.size is None and launch.variable != "PMIX_RANK":
        return None
    claim = launch.size or f"rank {launch.rank} of a job"
    return (
        f"launcher says {claim}, MPI says 1: {launch.name} ({launch.variable}) and the "
        f"MPI library ({library}) do not belong together, so nothing was started.\n"
        "  Use the mpiexec of that library (a pip wheel puts it beside its python), "
        "or with Slurm and MPICH: srun --mpi=pmi2.\n"
        "  For one rank on purpose: mpiexec -n 1, or unset "
        f"{launch.variable}."
    )


def threads_per_rank(masks: Sequence[frozenset[int]], mine: int) -> int:
    """Return how many BLAS threads rank `mine` of a node may run.

    masks holds the cores each rank of the node is allowed on. A core shared by k ranks
    counts 1/k, so ranks bound to their own cores use all of those, and unbound ranks
    share the node evenly. Never less than one.
    """
    users = Counter(core for mask in masks for core in mask)
    share = sum(1 / users[core] for core in masks[mine])
    return max(1, int(share + 1e-9))


def thread_settings(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the thread variables to set; those the user has set are left alone."""
    fallback = env.get(THREAD_VARIABLES[0]) or str(threads)
    return {name: fallback for name in THREAD_VARIABLES if not env.get(name)}


def thread_warning(env: Mapping[str, str], ranks: int, cores: int) -> str | None:
    """Return one line when the user's thread variables ask for more than the cores.

    ranks and cores are those of one node; env is as the user left it.
    """
    asked = {name: env.get(name, "").partition(",")[0] for name in THREAD_VARIABLES}
    chosen = {name: int(text) for name, text in asked.items() if text.isdecimal()}
    if not chosen:
        return None
    name, threads = max(chosen.items(), key=lambda item: item[1])
    if threads <= 1 or ranks * threads <= cores:
        return None
    return (
        f"mpipar: warning: {name}={threads} on {ranks} ranks of one node asks for "
        f"{ranks * threads} threads on {cores} cores; "
        f"leave it unset, or set it to {max(1, cores // ranks)}"
    )
