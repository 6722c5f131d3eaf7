"""Which way arrays of devices travel: found out by all ranks, one verdict for all."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpipar.comm import cuda_aware
from mpipar.comm.agree import raise_together
from mpipar.comm.memory import DeviceMemory, Direct, Staged
from mpipar.errors import DeviceError

# What a context and the libraries of a rank take of a device that ranks share
_CONTEXT_BYTES = 1 << 30
_HOW_NCCL = 'pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 with "cuda13"'


class Place(NamedTuple):
    """The device of one rank, and what it knows of NCCL (None: usable)."""

    host: str
    bus: str
    nccl: str | None


class Choice(NamedTuple):
    """How arrays travel.

    memory   what MPI sees of them;  nccl  whether NCCL makes the collectives
    text     that, in words;  sharing  how many ranks share this rank's device
    """

    memory: DeviceMemory
    nccl: bool
    text: str
    sharing: int


def own_place(device: int) -> Place:
    """The device that this rank works on."""
    import cupy

    bus = cupy.cuda.runtime.deviceGetPCIBusId(device)
    return Place(socket.gethostname(), bus, _nccl_obstacle())


def choose(asked: str, world: Any, ops: Any) -> Choice:
    """Decide for all ranks of ``world``; they all call it.

    asked    "auto", "nccl", "cuda_aware" or "staged"; auto = the first of them that all
             ranks can use
    Raises   DeviceError on all ranks where what is asked for cannot be had
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    places = world.all_gather_obj(own_place(device))
    sharing = places.count(places[world.rank])
    against = nccl_obstacle(places)
    if asked in ("auto", "nccl") and against is None:
        nccl = True
    elif asked == "nccl":
        raise_together(DeviceError(_refusal("nccl", against)), world)
    else:
        nccl = False
    direct = None
    if asked != "staged":
        direct = _direct_obstacle(world, device)
        if asked == "cuda_aware" and direct is not None:
            raise_together(DeviceError(_refusal(asked, direct)), world)
    memory = Staged(ops) if asked == "staged" or direct is not None else Direct(ops)
    text = describe(memory.name, nccl)
    if shared := shared_devices(places):
        text += f"; {shared[0]}" + (", and so on" if len(shared) > 1 else "")
    return Choice(memory, nccl, text, sharing)


def describe(memory: str, nccl: bool) -> str:
    """In words, for the log."""
    ways = {"staged": "MPI on pinned host memory", "cuda_aware": "CUDA-aware MPI"}
    if nccl:
        return f"arrays travel by NCCL, messages by {ways[memory]}"
    return f"arrays travel by {ways[memory]}"


def nccl_obstacle(places: Sequence[Place]) -> str | None:
    """Why these ranks cannot use NCCL; None where they can."""
    for place in places:
        if place.nccl is not None:
            return f"{place.nccl} on {place.host}"
    shared = shared_devices(places)
    return f"NCCL wants a GPU for each rank: {shared[0]}" if shared else None


def shared_devices(places: Sequence[Place]) -> list[str]:
    """In words, each device that several ranks have."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault((place.host, place.bus), []).append(rank)
    return [
        f"ranks {', '.join(map(str, own))} share GPU {bus} of {host}"
        for (host, bus), own in ranks.items()
        if len(own) > 1
    ]


def memory_share(total: int, sharing: int) -> int | None:
    """Bytes of a device of ``total`` bytes that each of the ranks that share it may
    take for arrays; None = all."""
    if sharing == 1:
        return None
    return max(total // (2 * sharing), total // sharing - _CONTEXT_BYTES)


def limit_memory(sharing: int) -> None:
    """Leave other ranks their share of this rank's device."""
    import cupy

    _, total = cupy.cuda.runtime.memGetInfo()
    share, pool = memory_share(total, sharing), cupy.get_default_memory_pool()
    # A user may have set a lower limit (CUPY_GPU_MEMORY_LIMIT); 0 is none
    if share is not None and not 0 < pool.get_limit() < share:
        pool.set_limit(size=share)


def _refusal(asked: str, reason: str) -> str:
    return f'parallel.transport = "{asked}": {reason}; try "auto" or "staged"'


def _direct_obstacle(world: Any, device: int) -> str | None:
    """What speaks against device pointers on any rank. Rank 0 alone makes the trial."""
    own = cuda_aware.claim(os.environ, cuda_aware.loaded_libraries())
    found = [text for text in world.all_gather_obj(own) if text is not None]
    if found:
        return found[0]
    tried = None
    if world.rank == 0 and cuda_aware.asked(os.environ) is None:
        tried = cuda_aware.trial(os.environ, device)
    return world.broadcast_obj(tried)


def _nccl_obstacle() -> str | None:
    with warnings.catch_warnings():
        # CuPy warns where it does not find the library
        warnings.simplefilter("ignore")
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            return f"CuPy has no NCCL ({error})"
        if not nccl.available:
            return f"the NCCL library is not found ({_HOW_NCCL})"
    return None
