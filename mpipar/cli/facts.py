"""Facts about one rank's machine and libraries, for the doctor."""

import importlib
import os
import platform
import shutil
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from mpipar.cli.gpus import Gpus, collect_gpus
from mpipar.cli.limits import Limits, collect_limits
from mpipar.cli.mpi_build import MpiBuild, collect_build


@dataclass(frozen=True)
class Facts:
    """What one rank sees. Sizes in bytes; None where there is nothing.

    cores       numbers of those that this process may use
    node_cores  how many the job may use on this node
    quota       processors' worth of time that a container gets
    """

    host: str
    python: str
    cores: frozenset[int]
    node_cores: int
    quota: float | None
    mpi: str
    mpi_size: int
    build: MpiBuild
    numpy: str
    blas: tuple[tuple[str, int], ...]
    numba: str | None
    bf16_obstacle: str | None
    h5py: str | None
    hdf5: str | None
    file_locking: str
    shm_free: int | None
    gpus: Gpus
    limits: Limits


def collect(mpi_size: int) -> Facts:
    """Look at this rank's process and machine."""
    from mpipar.cli.cgroup import read_cgroup
    from mpipar.cli.world import mpi_library
    from mpipar.ops import bf16_obstacle

    h5py, cgroup = _module("h5py"), read_cgroup()
    return Facts(
        host=socket.gethostname(),
        python=platform.python_version(),
        cores=frozenset(os.sched_getaffinity(0)),
        node_cores=_node_cores(cgroup.cores),
        quota=cgroup.quota,
        mpi=mpi_library(),
        mpi_size=mpi_size,
        build=collect_build(),
        numpy=importlib.import_module("numpy").__version__,
        blas=_blas(),
        numba=_version("numba"),
        bf16_obstacle=bf16_obstacle(),
        h5py=h5py and h5py.__version__,
        hdf5=h5py and h5py.version.hdf5_version,
        file_locking=os.environ.get("HDF5_USE_FILE_LOCKING", ""),
        shm_free=_free("/dev/shm"),
        gpus=collect_gpus(),
        limits=collect_limits(cgroup.memory),
    )


def _node_cores(group: frozenset[int] | None) -> int:
    """Cores of this node that are the job's, whichever this rank is bound to."""
    known = [len(group) if group else os.cpu_count() or 1]
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if granted.isdecimal():
        known.append(int(granted))
    return min(known)


def _module(name: str) -> ModuleType | None:
    """A module that only its own room may import for work; here for its version."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _blas() -> tuple[tuple[str, int], ...]:
    """Name and threads of every BLAS that NumPy has loaded."""
    from threadpoolctl import threadpool_info

    return tuple(
        (
            f"{pool['internal_api']} {pool.get('version') or ''}".strip(),
            pool["num_threads"],
        )
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    )


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
