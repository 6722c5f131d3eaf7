"""Which GPU a rank takes before MPI starts, as some libraries take one themselves then.

Neither MPI, NumPy nor CuPy here: the driver is asked by itself.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

# The rank's place on its node, as launchers and libraries name it
_PLACES = (
    "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
)  # fmt: skip
# Where one of these is 1, MPI makes a context on the first device it sees
_EAGER = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MVP_USE_CUDA")


def place_on_node(env: Mapping[str, str]) -> int | None:
    """The rank's place among those of its node; None where the launcher says none."""
    for name in _PLACES:
        if env.get(name, "").isdecimal():
            return int(env[name])
    return None


def device_of(place: int, devices: int) -> int:
    """The device of the rank at a place of a node, of those that it sees."""
    return place % devices


def bind_device(env: Mapping[str, str], driver: Any = None) -> int | None:
    """Make the rank's device the current one before MPI takes the first; return it.

    driver   the CUDA driver's library; None = load it
    None     where MPI takes none, or there is none to choose. What is wrong with the
             driver is told later, by those who need it
    """
    place = place_on_node(env)
    if place is None or not any(env.get(name) == "1" for name in _EAGER):
        return None
    try:
        cuda = driver or ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, context = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    chosen = device_of(place, count.value)
    failed = (
        cuda.cuDeviceGet(ctypes.byref(device), chosen)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )
    return None if failed else chosen


def place_warning(env: Mapping[str, str], place: int) -> str | None:
    """One line where MPI has another place on the node for a rank than its launcher."""
    told = place_on_node(env)
    if told is None or told == place or not any(env.get(n) == "1" for n in _EAGER):
        return None
    return (
        f"mpipar: warning: the launcher says that this is rank {told} of its node, MPI "
        f"says {place}: MPI has taken memory of another GPU than it will work on"
    )
