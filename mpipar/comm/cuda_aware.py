"""Whether the MPI library takes pointers to the memory of a GPU.

One that does not is likely to crash on such a pointer rather than to refuse it, so what
the library says is tried in a process of its own before it is believed.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

OVERRIDE = "MPIPAR_CUDA_AWARE"
_ENABLED = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MVP_USE_CUDA")
_SWITCHES = (*_ENABLED, "MPIR_CVAR_ENABLE_GPU")
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH
_MAPS = Path("/proc/self/maps")
_LIMIT_S = 60.0
# Variables by which a launcher claims a process as a rank of its job
_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "HYDI_", "HYDRA_", "MPI_LOCAL",
              "PALS_", "FLUX_", "MV2_COMM_", "MPIEXEC_")  # fmt: skip
# A device sends itself some bytes through MPI
_TRIAL = """
import sys
import cupy
cupy.cuda.Device(int(sys.argv[1])).use()
from mpi4py import MPI
x, y = cupy.arange(64, dtype="u1"), cupy.zeros(64, "u1")
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Sendrecv([x, MPI.BYTE], 0, 0, [y, MPI.BYTE], 0, 0)
print("same" if bool((x == y).all()) else "other")
"""


def asked(env: Mapping[str, str]) -> bool | None:
    """What MPIPAR_CUDA_AWARE = 0 or 1 says; None where it says nothing."""
    return {"0": False, "1": True}.get(env.get(OVERRIDE, ""))


def claim(env: Mapping[str, str], files: Sequence[str]) -> str | None:
    """What the user, the library and its variables say against device pointers; None
    if they say that it takes them."""
    if asked(env) is not None:
        return None if asked(env) else f"{OVERRIDE} = 0"
    off = [name for name in _SWITCHES if env.get(name) == "0"]
    if off:
        return f"{off[0]} = 0"
    answer = told(files)
    if answer is not None:
        return None if answer else "the MPI library is built without CUDA"
    if any(env.get(name) == "1" for name in _ENABLED):
        return None
    return (
        f"the MPI library does not say that it takes them ({OVERRIDE} = 1 if it does)"
    )


def told(files: Sequence[str]) -> bool | None:
    """What the libraries say of device pointers, asked by the extensions that MPICH and
    Open MPI have; None where they have none."""
    for file in files:
        try:
            library = ctypes.CDLL(file)
        except OSError:
            continue
        if hasattr(library, "MPIX_GPU_query_support"):
            found = ctypes.c_int(0)
            failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(found))
            return not failed and found.value == 1
        if hasattr(library, "MPIX_Query_cuda_support"):
            return library.MPIX_Query_cuda_support() == 1
    return None


def loaded_libraries(maps: Path = _MAPS) -> tuple[str, ...]:
    """Paths of the MPI libraries among the files that a process has mapped."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    names = ("libmpi.so", "libmpi_abi.so", "libmpich.so", "libmpi_cray.so")
    return tuple(sorted(p for p in paths if Path(p).name.startswith(names)))


def trial(
    env: Mapping[str, str],
    device: int,
    code: str = _TRIAL,
    limit_s: float = _LIMIT_S,
    run: Callable = subprocess.run,
) -> str | None:
    """What went wrong when a process sent from a device to itself; None if nothing."""
    alone = {k: v for k, v in env.items() if not k.startswith(_LAUNCHERS)}
    command = [sys.executable, "-c", code, str(device)]
    try:
        done = run(command, env=alone, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"a trial of device memory in MPI did not end in {limit_s:g} s"
    except OSError as error:
        return f"a trial of device memory in MPI could not start: {error}"
    if done.returncode == 0 and done.stdout.split()[-1:] == ["same"]:
        return None
    if done.returncode < 0:
        return f"a trial of device memory in MPI ended by signal {-done.returncode}"
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return f"a trial of device memory in MPI failed: {''.join(last)}"
