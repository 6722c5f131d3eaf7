"""Who is compared: one entry each, and how each is started."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MPIPAR, TORCH, JAX = "mpipar", "torch", "jax"
# How a contestant spreads over the cores.
ONE_CORE, THREADS, PROCESSES = "one core", "threads", "processes"
# Parts of a step's batch in a pipeline.
PARTS = 8


@dataclass(frozen=True)
class Contestant:
    """One way to train the recipe.

    library   mpipar, torch or jax
    spread    one core; one process with a thread a core; or a process pinned to each
    words     for torch the arguments of torch_worker.py, for mpipar changes of the
              recipe, in which {cores} is the number of cores
    device    where its arrays live: cpu, or cuda for one process on the first GPU
    """

    name: str
    about: str
    library: str
    spread: str = PROCESSES
    precision: str = "fp32"
    words: tuple[str, ...] = ()
    micro_batches: int = 1
    device: str = "cpu"

    def processes(self, cores: int) -> int:
        """Processes on a machine of so many cores."""
        return cores if self.spread == PROCESSES else 1

    def threads(self, cores: int) -> int:
        """Threads of each process that compute."""
        return cores if self.spread == THREADS else 1


def _on_gpu(name: str, about: str, library: str, *words: str) -> Contestant:
    return Contestant(name, about, library, THREADS, "bf16", words, device="cuda")


CONTESTANTS = (
    Contestant("torch-eager-1", "PyTorch on one core", TORCH, ONE_CORE),
    Contestant("torch-eager", "PyTorch, a thread a core", TORCH, THREADS),
    Contestant(
        "torch-compile", "torch.compile", TORCH, THREADS, words=("--mode=compile",)
    ),
    Contestant("torch-bf16", "autocast to bf16", TORCH, THREADS, "bf16"),
    Contestant(
        "torch-bf16-compile",
        "autocast and torch.compile",
        TORCH,
        THREADS,
        "bf16",
        ("--mode=compile",),
    ),
    Contestant("torch-ddp", "data parallel over gloo", TORCH, words=("--mode=ddp",)),
    Contestant(
        "torch-fsdp2", "fully_shard per block, gloo", TORCH, words=("--mode=fsdp2",)
    ),
    Contestant("torch-tp", "DTensor, blocks alone, gloo", TORCH, words=("--mode=tp",)),
    Contestant(
        "torch-pp-1f1b",
        "PipelineStage and Schedule1F1B, gloo",
        TORCH,
        words=("--mode=pp-1f1b",),
        micro_batches=PARTS,
    ),
    Contestant(
        "torch-pp-zb",
        "the same with ScheduleInterleavedZeroBubble",
        TORCH,
        words=("--mode=pp-zb",),
        micro_batches=PARTS,
    ),
    Contestant("jax", "jit, a thread a core", JAX, THREADS),
    Contestant("mpipar-1x1", "one rank on one core", MPIPAR, ONE_CORE),
    Contestant("mpipar-1x2", "one rank, a thread a core", MPIPAR, THREADS),
    Contestant("mpipar-dp", "data parallel", MPIPAR),
    Contestant(
        "mpipar-tp", "tensor parallel", MPIPAR, words=("parallel.tensor={cores}",)
    ),
    Contestant(
        "mpipar-zero1",
        "data parallel, optimizer state shared",
        MPIPAR,
        words=("parallel.zero=1",),
    ),
    Contestant(
        "mpipar-zero3", "data parallel, all shared", MPIPAR, words=("parallel.zero=3",)
    ),
    Contestant(
        "mpipar-pp-1f1b",
        "a pipeline stage a rank, 1F1B",
        MPIPAR,
        words=("parallel.pipeline={cores}", "parallel.schedule=1f1b"),
        micro_batches=PARTS,
    ),
    Contestant(
        "mpipar-pp-zb-h1",
        "a pipeline stage a rank, ZB-H1",
        MPIPAR,
        words=("parallel.pipeline={cores}", "parallel.schedule=zb-h1"),
        micro_batches=PARTS,
    ),
    Contestant("mpipar-bf16-dp", "data parallel, bf16", MPIPAR, precision="bf16"),
    _on_gpu("torch-cuda", "autocast to bf16, fused AdamW", TORCH),
    _on_gpu(
        "torch-cuda-compile", "the same with torch.compile", TORCH, "--mode=compile"
    ),
    _on_gpu(
        "torch-cuda-blocks", "each block compiled, for many", TORCH, "--mode=blocks"
    ),
    _on_gpu("mpipar-cuda", "one rank, bf16", MPIPAR),
    _on_gpu("mpipar-cuda-graph", "its passes recorded", MPIPAR, "train.graph=true"),
)
REFERENCE = "torch-eager"
NAMES = tuple(c.name for c in CONTESTANTS)


@dataclass(frozen=True)
class Match:
    """What the commands of all contestants share.

    recipe     the recipe's name or file;  changes  of its fields, as key=value
    folder     holds work.json, work.npz and a link to this package
    cores      core numbers that may be used
    python     the Python with torch and jax
    batch      sequences of a step
    """

    recipe: str
    changes: tuple[str, ...]
    folder: Path
    cores: tuple[int, ...]
    python: str
    batch: int

    def obstacle(self, contestant: Contestant) -> str | None:
        """Why this contestant cannot make the batch, or None."""
        parts = contestant.micro_batches
        if self.batch % parts == 0:
            return None
        near = -(-self.batch // parts) * parts
        return (
            f"{self.batch} sequences cannot be made in {parts} micro-batches; try "
            f"train.global_batch={near}"
        )

    def commands(self, contestant: Contestant, folder: Path) -> list[list[str]]:
        """What to start: mpiexec starts all ranks, torch's are started one by one."""
        count = contestant.processes(len(self.cores))
        used = self.cores[:1] if contestant.spread == ONE_CORE else self.cores
        common = [f"--folder={folder}", f"--cores={','.join(map(str, used))}"]
        if contestant.library == MPIPAR:
            words = [word.format(cores=count) for word in contestant.words]
            words.append(f"train.precision={contestant.precision}")
            words.append(f"train.device={contestant.device}")
            if contestant.micro_batches > 1:
                micro_batch = self.batch // contestant.micro_batches
                words.append(f"train.micro_batch={micro_batch}")
            worker = [sys.executable, "-m", "mpipar", "bench", "serve", self.recipe]
            worker += [*self.changes, *words, *common]
            return [worker if count == 1 else [mpiexec(), "-n", str(count), *worker]]
        module = f"mpipar.bench.{contestant.library}_worker"
        worker = [self.python, "-m", module, *common]
        if contestant.library == JAX:
            return [worker]
        worker += [f"--processes={count}", f"--precision={contestant.precision}"]
        worker += [f"--threads={contestant.threads(len(self.cores))}"]
        worker += [f"--micro-batches={contestant.micro_batches}"]
        worker += [f"--device={contestant.device}"]
        return [[*worker, *contestant.words, f"--rank={rank}"] for rank in range(count)]

    def environment(self, contestant: Contestant) -> dict[str, str]:
        """This process's environment, without what would slow a contestant down."""
        slow = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        own = {k: v for k, v in os.environ.items() if k not in slow and not _counts(k)}
        own["OMP_NUM_THREADS"] = str(contestant.threads(len(self.cores)))
        # Where Open MPI counts fewer slots than there are cores.
        own.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        # Compile in the process itself, and meet the other ranks on this machine.
        if contestant.device == "cpu":
            own.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        own.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if contestant.library == JAX:
            # XLA counts its threads by NPROC, or else by the cores it is pinned to.
            own |= {"JAX_PLATFORMS": "cpu", "NPROC": own["OMP_NUM_THREADS"]}
        if contestant.library != MPIPAR:
            own["PYTHONPATH"] = str(self.folder)
        return own


def chosen(names: Sequence[str]) -> list[Contestant]:
    """The contestants of these names, in the order of the table."""
    return [c for c in CONTESTANTS if c.name in names]


def names_on(device: str) -> tuple[str, ...]:
    """All contestants of a device: "cuda", or else the CPU."""
    kind = "cuda" if device == "cuda" else "cpu"
    return tuple(c.name for c in CONTESTANTS if c.device == kind)


def mpiexec() -> str:
    """The launcher beside this Python, or else the first on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"


def _counts(variable: str) -> bool:
    return variable.endswith("_NUM_THREADS")
