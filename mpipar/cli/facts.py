"""Facts about one rank's machine and libraries, for the doctor."""

import importlib
import os
import platform
import shutil
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Facts:
    """What one rank sees. Sizes in bytes; None where there is nothing."""

    host: str
    python: str
    cores: frozenset[int]
    mpi: str
    mpi_size: int
    numpy: str
    blas: tuple[tuple[str, int], ...]
    numba: str | None
    bf16_obstacle: str | None
    h5py: str | None
    hdf5: str | None
    file_locking: str
    shm_free: int | None
    cupy: str | None
    gpus: int | None
    gpu_error: str
    disk_free: int
    folder: str
    writable: bool


def collect(mpi_size: int) -> Facts:
    """Look at this rank's process and machine."""
    from mpipar.cli.world import mpi_library
    from mpipar.ops import bf16_obstacle

    h5py = _module("h5py")
    gpus, gpu_error = _gpus()
    folder = Path.cwd()
    return Facts(
        host=socket.gethostname(),
        python=platform.python_version(),
        cores=frozenset(os.sched_getaffinity(0)),
        mpi=mpi_library(),
        mpi_size=mpi_size,
        numpy=importlib.import_module("numpy").__version__,
        blas=_blas(),
        numba=_version("numba"),
        bf16_obstacle=bf16_obstacle(),
        h5py=h5py and h5py.__version__,
        hdf5=h5py and h5py.version.hdf5_version,
        file_locking=os.environ.get("HDF5_USE_FILE_LOCKING", ""),
        shm_free=_free("/dev/shm"),
        cupy=_cupy_version(),
        gpus=gpus,
        gpu_error=gpu_error,
        disk_free=_free(folder) or 0,
        folder=str(folder),
        writable=os.access(folder, os.W_OK),
    )


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


def _free(path: str | Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def _cupy_version() -> str | None:
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
    return next(filter(None, map(_version, names)), None)


def _gpus() -> tuple[int | None, str]:
    """Number of GPUs that CuPy sees, and its complaint if it sees none."""
    cupy = _module("cupy")
    if cupy is None:
        return None, ""
    try:
        return cupy.cuda.runtime.getDeviceCount(), ""
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}"
