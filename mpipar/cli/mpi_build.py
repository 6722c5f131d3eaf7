"""Which MPI library is loaded, and for which one mpi4py was built."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipar.cli.finding import Finding, by_node

_NAMES = {
    "mpich": "the MPICH ABI",
    "openmpi": "the ABI of Open MPI",
    "mpiabi": "the standard ABI",
}
# Libraries that share MPICH's ABI, as they call themselves
_LIKE_MPICH = ("MPICH", "Intel", "MVAPICH")
_REBUILD = (
    "Build mpi4py with the mpicc of the library that runs it: "
    "pip install --no-binary mpi4py --force-reinstall mpi4py."
)


@dataclass(frozen=True)
class MpiBuild:
    """What mpi4py was built for and what it runs with.

    abi         mpich, openmpi or mpiabi where a wheel names it; else nothing
    built       MPI standard that mpi4py was built for; runs is the library's
    files       MPI libraries that this process has loaded
    cuda        whether messages may lie in GPU memory; None where it is not told
    """

    mpi4py: str
    abi: str
    built: tuple[int, int]
    runs: tuple[int, int]
    files: tuple[str, ...]
    cuda: bool | None
    all_threads: bool


def collect_build() -> MpiBuild:
    """Look at this process, in which MPI runs."""
    import mpi4py
    from mpi4py import MPI

    from mpipar.comm.cuda_aware import loaded_libraries, told

    # A wheel has a module for each ABI: MPI.mpich.cpython-….so
    words = Path(MPI.__file__).name.split(".")
    files = loaded_libraries()
    return MpiBuild(
        mpi4py=mpi4py.__version__,
        abi=words[1] if words[1] in _NAMES else "",
        built=(MPI.VERSION, MPI.SUBVERSION),
        runs=MPI.Get_version(),
        files=files,
        cuda=told(files),
        all_threads=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    )


def judge_build(builds: Sequence[tuple[str, str, MpiBuild]]) -> Finding:
    """Judge node, library and build of each rank."""
    _, library, first = builds[0]
    text = f"mpi4py {by_node((node, build.mpi4py) for node, _, build in builds)}"
    if first.abi:
        text += f" for {_NAMES[first.abi]}"
    text += "".join(f", {file}" for file in first.files)
    text += {True: ", CUDA-aware", False: ", not CUDA-aware", None: ""}[first.cuda]
    if len({(build.mpi4py, build.abi) for _, _, build in builds}) > 1:
        advice = "Start every rank from the same environment."
        return Finding("ABI", "bad", text, advice)
    if any(len(build.files) > 1 for _, _, build in builds):
        advice = "Two MPI libraries are loaded: remove one, or unset LD_LIBRARY_PATH, "
        advice += "LD_PRELOAD and MPI4PY_LIBMPI."
        return Finding("ABI", "bad", text, advice)
    family = "mpich" if any(n in library for n in _LIKE_MPICH) else "openmpi"
    if first.abi not in ("", "mpiabi", family):
        text += f", but the library is {library}"
        return Finding("ABI", "bad", text, _REBUILD)
    if any(build.runs < build.built for _, _, build in builds):
        built, runs = (".".join(map(str, v)) for v in (first.built, first.runs))
        text += f"; built for MPI {built}, but the library has MPI {runs}"
        return Finding("ABI", "warn", text, _REBUILD)
    if not all(build.all_threads for _, _, build in builds):
        text += "; without MPI_THREAD_MULTIPLE"
        advice = "A job that hangs may not be able to end itself: take a library that "
        advice += "was built with threads."
        return Finding("ABI", "warn", text, advice)
    return Finding("ABI", "ok", text)
