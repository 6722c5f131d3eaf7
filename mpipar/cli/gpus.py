"""The GPUs of a node, their driver, and whether CuPy can use them."""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.cli.device import device_of
from mpipar.cli.finding import Finding, by_node, count
from mpipar.cli.patience import within

if TYPE_CHECKING:
    from mpi4py import MPI

_DEV, _VERSION = Path("/dev"), Path("/proc/driver/nvidia/version")
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Gpus:
    """What one rank sees of GPUs.

    devices   NVIDIA devices of the machine, whoever may use them
    driver    version of the kernel's driver, "" without one
    cupy      name and version, None where it is not installed
    names     of the GPUs that CuPy sees; error is its complaint where it sees none
    """

    devices: int
    driver: str
    cupy: str | None
    names: tuple[str, ...]
    error: str


def collect_gpus() -> Gpus:
    """Look at devices, driver and CuPy; a driver that hangs is an error."""
    names: tuple[str, ...] = ()
    error, cupy = "", _cupy_version()
    if cupy is not None:
        try:
            names = within(_LIMIT_S, _names)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    devices = sum(1 for file in _DEV.glob("nvidia[0-9]*"))
    return Gpus(devices, _driver(_VERSION), cupy, names, error)


def judge_gpus(seen: Sequence[tuple[str, Gpus]]) -> Finding:
    """Judge node and GPUs of each rank."""
    if not any(gpus.devices or gpus.names for _, gpus in seen):
        broken = next((gpus for _, gpus in seen if gpus.cupy is not None), None)
        if broken is None:
            return Finding("GPU", "ok", "none: runs on CPUs")
        text = f"{broken.cupy}, no GPU seen. {broken.error}".rstrip()
        advice = "Runs on CPUs. Check nvidia-smi and CUDA_VISIBLE_DEVICES."
        return Finding("GPU", "warn", text, advice)
    text = by_node((host, _describe(gpus)) for host, gpus in seen)
    if any(gpus.cupy is None for _, gpus in seen):
        advice = 'Not used without CuPy: pip install "mpipar[cuda13]", or cuda12 for a '
        advice += "driver older than 580."
        return Finding("GPU", "warn", text, advice)
    if not all(gpus.names for _, gpus in seen):
        advice = "Some ranks see no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES."
        return Finding("GPU", "bad", text, advice)
    if len({_describe(gpus) for _, gpus in seen}) > 1:
        advice = "Nodes or ranks see different GPUs: a step waits for the slowest."
        return Finding("GPU", "warn", text, advice)
    ranks = Counter(host for host, _ in seen)
    host, most = ranks.most_common(1)[0]
    gpus = len(seen[0][1].names)
    if most > max(gpus, seen[0][1].devices):
        text += f"; {count(most, 'rank')} share {count(gpus, 'GPU')} of {host}"
        return Finding("GPU", "warn", text, "Start one rank a GPU.")
    return Finding("GPU", "ok", text)


def try_transports(world: MPI.Comm, own: Gpus) -> Finding | None:
    """How arrays of GPUs would travel; None where a rank sees none. Collective.

    The same rules as a run has: `mpipar.comm.choice`.
    """
    from mpipar.comm import cuda_aware, mpi
    from mpipar.comm.choice import nccl_obstacle, own_place, shared_devices

    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    place = node.rank
    node.Free()
    if not world.allreduce(bool(own.names), mpi.LAND):
        return None
    device = device_of(place, len(own.names))
    places = world.allgather(own_place(device))
    claims = world.allgather(
        cuda_aware.claim(os.environ, cuda_aware.loaded_libraries())
    )
    direct = next(filter(None, claims), None)
    if direct is None and cuda_aware.asked(os.environ) is None:
        tried = cuda_aware.trial(os.environ, device) if world.rank == 0 else None
        direct = world.bcast(tried)
    return judge_transports(nccl_obstacle(places), direct, shared_devices(places))


def judge_transports(
    nccl: str | None, direct: str | None, shared: Sequence[str]
) -> Finding:
    """Judge what speaks against NCCL and against CUDA-aware MPI; ``shared`` are the
    devices that several ranks have, in words."""
    roads = [f"no NCCL: {nccl}" if nccl else "NCCL"]
    roads.append(f"no device memory in MPI: {direct}" if direct else "CUDA-aware MPI")
    text = "; ".join([*roads, "pinned host memory"])
    if shared:
        advice = "Start one rank a GPU: those that share one wait for each other."
        return Finding("transport", "warn", "; ".join([*shared, text]), advice)
    if nccl:
        advice = "Sums of gradients go through host memory or MPI, which is slower."
        return Finding("transport", "warn", text, advice)
    return Finding("transport", "ok", text)


def _describe(gpus: Gpus) -> str:
    kinds = Counter(gpus.names)
    parts = [f"{number} x {name}" for name, number in kinds.items()]
    if not parts:
        parts = [f"{count(gpus.devices, 'NVIDIA GPU')}, none usable {gpus.error}"]
    parts += [f"driver {gpus.driver}"] if gpus.driver else []
    return ", ".join([*parts, gpus.cupy or "CuPy is not installed"])


def _names() -> tuple[str, ...]:
    runtime = importlib.import_module("cupy").cuda.runtime
    properties = map(runtime.getDeviceProperties, range(runtime.getDeviceCount()))
    return tuple(found["name"].decode() for found in properties)


def _driver(file: Path) -> str:
    try:
        found = re.search(r"(\d+\.\d+[.\d]*)", file.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _cupy_version() -> str | None:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None
