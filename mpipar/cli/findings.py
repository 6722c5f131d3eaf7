"""Judges the facts of all ranks: each finding is ok, warn or bad, with what to do."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpipar.cli.binding import Place, judge_binding
from mpipar.cli.facts import Facts
from mpipar.cli.finding import GIB, Finding, by_node, count
from mpipar.cli.gpus import judge_gpus
from mpipar.cli.launch import Launch, singleton_message
from mpipar.cli.limits import judge_limits, judge_memory
from mpipar.cli.mpi_build import judge_build

# /dev/shm: containers often get 64 MiB, where MPI dies with a bus error. MPI takes one
# to a few MiB a rank, and more for large messages.
_LEAST_SHM, _LEAST_SHM_A_RANK = GIB // 4, GIB // 32


def judge(facts: Sequence[Facts], launch: Launch) -> list[Finding]:
    """Judge the facts of all ranks, in rank order."""
    mpi, limits = facts[0].mpi, [(fact.host, fact.limits) for fact in facts]
    return [
        _python(facts),
        _mpi(facts, launch),
        judge_build([(fact.host, fact.mpi, fact.build) for fact in facts]),
        *_nodes(facts),
        _cores(facts),
        judge_binding(_places(facts), mpi, launch),
        _blas(facts),
        _kernels(facts),
        _bf16(facts),
        judge_memory(limits),
        judge_limits(limits),
        _shm(facts),
        judge_gpus([(fact.host, fact.gpus) for fact in facts]),
        _hdf5(facts),
    ]


def judge_sharing(works: Sequence[bool]) -> Finding:
    """Judge whether each rank could share memory with the others on its node."""
    if all(works):
        return Finding("sharing", "ok", "ranks of a node sum in each other's memory")
    text = "ranks of a node cannot reach each other's memory"
    advice = "Gradients go by messages, which is slower: start the ranks of a node as "
    advice += "one user and in one container."
    return Finding("sharing", "warn", text, advice)


def _by_node(facts: Sequence[Facts], value: Callable[[Facts], object]) -> str:
    return by_node((fact.host, value(fact)) for fact in facts)


def _differ(facts: Sequence[Facts], value: Callable[[Facts], Any]) -> bool:
    return len({value(fact) for fact in facts}) > 1


def _python(facts: Sequence[Facts]) -> Finding:
    text = f"Python {_by_node(facts, lambda fact: fact.python)}, "
    text += f"NumPy {_by_node(facts, lambda fact: fact.numpy)}"
    if _differ(facts, lambda fact: (fact.python, fact.numpy)):
        advice = "Start every rank from the same environment."
        return Finding("Python", "bad", text, advice)
    return Finding("Python", "ok", text)


def _mpi(facts: Sequence[Facts], launch: Launch) -> Finding:
    first = facts[0]
    reason = singleton_message(launch, first.mpi_size, first.mpi)
    if reason:
        line, _, advice = reason.partition("\n")
        return Finding("MPI", "bad", line, " ".join(advice.split()))
    text = f"{_by_node(facts, lambda fact: fact.mpi)}, {count(len(facts), 'rank')}"
    text += f", started by {launch.name}"
    if _differ(facts, lambda fact: fact.mpi):
        advice = "Install the same MPI on all nodes."
        return Finding("MPI", "bad", text, advice)
    return Finding("MPI", "ok", text)


def _nodes(facts: Sequence[Facts]) -> list[Finding]:
    """One finding where there are several nodes."""
    ranks = Counter(fact.host for fact in facts)
    if len(ranks) == 1:
        return []
    nodes = {fact.host: fact for fact in facts}
    details = [
        {
            "host": host,
            "ranks": ranks[host],
            "cores": fact.node_cores,
            "memory": fact.limits.memory,
        }
        for host, fact in nodes.items()
    ]
    text = f"{len(ranks)} nodes"
    text += f"; ranks on each: {by_node(ranks.items())}"
    text += f"; cores: {_by_node(facts, lambda fact: fact.node_cores)}"
    if len(set(ranks.values())) == 1 and not _differ(facts, lambda f: f.node_cores):
        return [Finding("nodes", "ok", text, details=details)]
    advice = "A step waits for the slowest rank: take equal nodes and as many ranks on "
    advice += "each (mpiexec -ppn N, mpiexec --map-by ppr:N:node, or "
    advice += "srun --ntasks-per-node=N)."
    return [Finding("nodes", "warn", text, advice, details)]


def _places(facts: Sequence[Facts]) -> list[Place]:
    return [
        Place(rank, fact.host, fact.cores, fact.node_cores, _threads(fact))
        for rank, fact in enumerate(facts)
    ]


def _threads(fact: Facts) -> int:
    return max((threads for _, threads in fact.blas), default=0)


def _cores(facts: Sequence[Facts]) -> Finding:
    ranks = Counter(fact.host for fact in facts)
    cores = {fact.host: fact.node_cores for fact in facts}
    host = max(ranks, key=lambda name: ranks[name] / cores[name])
    text = f"{count(ranks[host], 'rank')} on {count(cores[host], 'core')} of {host}"
    if len(ranks) > 1:
        text = f"{len(ranks)} nodes; fullest: {text}"
    if ranks[host] <= cores[host]:
        return _check_quota(facts, ranks) or Finding("cores", "ok", text)
    return Finding("cores", "warn", text, _crowd_advice(facts[0].mpi))


def _check_quota(facts: Sequence[Facts], ranks: Mapping[str, int]) -> Finding | None:
    """A warning where a container gets less time than its ranks' threads want."""
    for fact in facts:
        threads = ranks[fact.host] * _threads(fact)
        if fact.quota is not None and fact.quota < threads:
            text = f"{threads} threads on {fact.host}, in a container with the time of "
            text += f"{fact.quota:g} of {fact.node_cores} cores"
            advice = "Threads are stopped when it is used up. Start fewer ranks, set "
            advice += "OMP_NUM_THREADS=1, or raise the limit (docker run --cpus)."
            return Finding("cores", "warn", text, advice)
    return None


def _crowd_advice(mpi: str) -> str:
    advice = "More ranks than cores: good for trials, but no faster than a rank a core."
    if "Open MPI" in mpi:
        return f"{advice} Use mpiexec --oversubscribe, which binds no rank."
    return advice


def _blas(facts: Sequence[Facts]) -> Finding:
    pools = Counter(pool for fact in facts for pool in fact.blas)
    if not pools:
        advice = "NumPy's own matrix product is slow: install a NumPy wheel from PyPI."
        return Finding("BLAS", "warn", "no BLAS library found", advice)
    text = ", ".join(
        f"{name} with {count(threads, 'thread')}" for name, threads in sorted(pools)
    )
    threads = Counter()
    for fact in facts:
        threads[fact.host] += _threads(fact)
    for host, total in threads.items():
        here = [fact for fact in facts if fact.host == host]
        cores = len(frozenset().union(*(fact.cores for fact in here)))
        if total > max(cores, len(here)):
            advice = "Leave OMP_NUM_THREADS and its like unset, or set it to 1."
            text += f"; {total} threads on {count(cores, 'core')} of {host}"
            return Finding("BLAS", "warn", text, advice)
    return Finding("BLAS", "ok", text)


def _kernels(facts: Sequence[Facts]) -> Finding:
    if all(fact.numba for fact in facts):
        return Finding("kernels", "ok", f"compiled by {facts[0].numba}")
    advice = "Plain NumPy does the work, a good third slower: pip install numba."
    return Finding("kernels", "warn", "numba is not installed", advice)


def _bf16(facts: Sequence[Facts]) -> Finding:
    obstacle = next(filter(None, (fact.bf16_obstacle for fact in facts)), None)
    if obstacle is None:
        return Finding("bf16", "ok", "oneDNN multiplies bf16 numbers here")
    return Finding("bf16", "ok", f"computed through fp32, slowly: {obstacle}")


def _hdf5(facts: Sequence[Facts]) -> Finding:
    if any(fact.h5py is None for fact in facts):
        advice = "Checkpoints need it: pip install h5py."
        return Finding("HDF5", "bad", "h5py cannot be imported", advice)
    text = _by_node(facts, lambda fact: f"h5py {fact.h5py}, HDF5 {fact.hdf5}")
    if _differ(facts, lambda fact: (fact.h5py, fact.hdf5)):
        advice = "Start every rank from the same environment."
        return Finding("HDF5", "bad", text, advice)
    if facts[0].file_locking:
        text += f", HDF5_USE_FILE_LOCKING={facts[0].file_locking}"
    return Finding("HDF5", "ok", text)


def _shm(facts: Sequence[Facts]) -> Finding:
    ranks = Counter(fact.host for fact in facts)
    free = [
        (fact.shm_free / ranks[fact.host], fact.shm_free, fact.host)
        for fact in facts
        if fact.shm_free is not None
    ]
    if not free:
        advice = "MPI inside a node falls back to slower ways."
        return Finding("/dev/shm", "warn", "not there", advice)
    share, least, host = min(free)
    text = f"{least / GIB:.1f} GiB free"
    if ranks[host] > 1:
        text += f" for {ranks[host]} ranks"
    text += f" on {host}, the least" if len(ranks) > 1 else ""
    if least < _LEAST_SHM or share < _LEAST_SHM_A_RANK:
        advice = "Too small for MPI's shared memory: docker run --shm-size=2g."
        return Finding("/dev/shm", "bad", text, advice)
    return Finding("/dev/shm", "ok", text)
