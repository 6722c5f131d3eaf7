"""Judges the facts of all ranks: each finding is ok, warn or bad, with what to do."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpipar.cli.facts import Facts
from mpipar.cli.launch import Launch, singleton_message

_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: state is ok, warn or bad; details are for --json."""

    name: str
    state: str
    text: str
    advice: str = ""
    details: Sequence[Mapping[str, Any]] = ()


def judge(facts: Sequence[Facts], launch: Launch) -> list[Finding]:
    """Judge the facts of all ranks, in rank order."""
    return [
        _python(facts),
        _mpi(facts, launch),
        _cores(facts),
        _blas(facts),
        _kernels(facts),
        _bf16(facts),
        _hdf5(facts),
        _shm(facts),
        _gpu(facts),
        _disk(facts),
    ]


def judge_sharing(works: Sequence[bool]) -> Finding:
    """Judge whether each rank could share memory with the others on its node."""
    if all(works):
        return Finding("sharing", "ok", "ranks of a node sum in each other's memory")
    text = "ranks of a node cannot reach each other's memory"
    advice = "Gradients go by messages, which is slower: start the ranks of a node as "
    advice += "one user and in one container."
    return Finding("sharing", "warn", text, advice)


def _values(facts: Sequence[Facts], field: str) -> list[str]:
    return sorted({str(getattr(fact, field)) for fact in facts})


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _python(facts: Sequence[Facts]) -> Finding:
    versions, numpys = _values(facts, "python"), _values(facts, "numpy")
    text = f"Python {' / '.join(versions)}, NumPy {' / '.join(numpys)}"
    if len(versions) > 1 or len(numpys) > 1:
        advice = "Start every rank from the same environment."
        return Finding("Python", "bad", text, advice)
    return Finding("Python", "ok", text)


def _mpi(facts: Sequence[Facts], launch: Launch) -> Finding:
    first = facts[0]
    reason = singleton_message(launch, first.mpi_size, first.mpi)
    if reason:
        line, _, advice = reason.partition("\n")
        return Finding("MPI", "bad", line, " ".join(advice.split()))
    ranks = _count(len(facts), "rank")
    return Finding("MPI", "ok", f"{first.mpi}, {ranks}, started by {launch.name}")


def _cores(facts: Sequence[Facts]) -> Finding:
    ranks = Counter(fact.host for fact in facts)
    cores = {
        host: len(frozenset().union(*(f.cores for f in facts if f.host == host)))
        for host in ranks
    }
    host = max(ranks, key=lambda name: ranks[name] / cores[name])
    text = f"{_count(ranks[host], 'rank')} on {_count(cores[host], 'core')} of {host}"
    if len(ranks) > 1:
        text = f"{len(ranks)} nodes; fullest: {text}"
    if ranks[host] <= cores[host]:
        return Finding("cores", "ok", text)
    return Finding("cores", "warn", text, _crowd_advice(facts[0].mpi))


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
        f"{name} with {_count(threads, 'thread')}" for name, threads in sorted(pools)
    )
    threads = Counter()
    for fact in facts:
        threads[fact.host] += max((count for _, count in fact.blas), default=0)
    for host, total in threads.items():
        here = [fact for fact in facts if fact.host == host]
        cores = len(frozenset().union(*(fact.cores for fact in here)))
        if total > max(cores, len(here)):
            advice = "Leave OMP_NUM_THREADS and its like unset, or set it to 1."
            text += f"; {total} threads on {cores} cores of {host}"
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
    first = facts[0]
    if any(fact.h5py is None for fact in facts):
        advice = "Checkpoints need it: pip install h5py."
        return Finding("HDF5", "bad", "h5py cannot be imported", advice)
    locking = f"HDF5_USE_FILE_LOCKING={first.file_locking or '(unset)'}"
    text = f"h5py {first.h5py}, HDF5 {first.hdf5}, {locking}"
    return Finding("HDF5", "ok", text)


def _shm(facts: Sequence[Facts]) -> Finding:
    free = [fact.shm_free for fact in facts if fact.shm_free is not None]
    if not free:
        advice = "MPI inside a node falls back to slower ways."
        return Finding("/dev/shm", "warn", "not there", advice)
    text = f"{min(free) / _GIB:.1f} GiB free"
    # Containers often get 64 MiB, where MPI dies with a bus error.
    if min(free) < _GIB / 4:
        advice = "Too small for MPI's shared memory: docker run --shm-size=2g."
        return Finding("/dev/shm", "bad", text, advice)
    return Finding("/dev/shm", "ok", text)


def _gpu(facts: Sequence[Facts]) -> Finding:
    first = facts[0]
    if first.cupy is None:
        return Finding("GPU", "ok", "CuPy is not installed: runs on CPUs")
    if not first.gpus:
        text = f"{first.cupy}, no GPU seen {first.gpu_error}".rstrip()
        advice = "Runs on CPUs. Check nvidia-smi and CUDA_VISIBLE_DEVICES."
        return Finding("GPU", "warn", text, advice)
    return Finding("GPU", "ok", f"{first.cupy}, {first.gpus} on {first.host}")


def _disk(facts: Sequence[Facts]) -> Finding:
    least = min(facts, key=lambda fact: fact.disk_free)
    text = f"{least.disk_free / _GIB:.1f} GiB free in {least.folder}"
    if not all(fact.writable for fact in facts):
        return Finding("disk", "bad", f"{text}, not writable", "Start elsewhere.")
    if least.disk_free < _GIB:
        return Finding("disk", "warn", text, "Checkpoints need room here.")
    return Finding("disk", "ok", text)
