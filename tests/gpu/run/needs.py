"""Prints what is missing for the run as pip names, a line each; standard library alone.

"?" before a name: the run goes on without it, and leaves out what it is for.
"""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# Module -> package
NEEDED = {
    "numpy": "numpy",
    "numba": "numba",
    "mpi4py": "mpi4py",
    "h5py": "h5py",
    "pydantic": "pydantic",
    "rich": "rich",
    "threadpoolctl": "threadpoolctl",
    "tokenizers": "tokenizers",
    "xxhash": "xxhash",
    "pytest": "pytest",
}
WORLD = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"


def main() -> None:
    """List them; --dry-run needs no GPU's packages."""
    missing = [package for module, package in NEEDED.items() if not works(module)]
    if "--dry-run" not in sys.argv:
        kind = "13x" if cuda_version() >= 13 else "12x"
        missing += [f"cupy-cuda{kind}"] * (not works("cupy"))
        missing += ["?nvidia-cudnn-frontend<1.27"] * (not there("cudnn"))
        missing += ["?torch"] * (not there("torch"))
    if "mpi4py" not in missing and not mpi_works():
        # A wheel of mpi4py takes the MPI that lies beside Python.
        missing.append("mpi4py" if beside("mpiexec") else "mpich")
    print("\n".join(missing))


def works(module: str) -> bool:
    """Whether it can be imported; what is there and broken says why."""
    if find_spec(module) is None:
        return False
    try:
        import_module(module)
    except Exception as error:
        print(f"{module} cannot be imported: {error}", file=sys.stderr)
        return False
    return True


def there(module: str) -> bool:
    """Whether this Python has it; a large one is not loaded to see."""
    return find_spec(module) is not None


def beside(program: str) -> str | None:
    """The program of this Python's environment."""
    file = Path(sys.executable).with_name(program)
    return str(file) if file.exists() else None


def mpi_works() -> bool:
    """Whether mpiexec and mpi4py make one world of two ranks."""
    launcher = beside("mpiexec") or shutil.which("mpiexec")
    if launcher is None:
        return False
    command = [launcher, "-n", "2", sys.executable, "-c", WORLD]
    try:
        job = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "".join(job.stdout.split()) == "22"


def cuda_version() -> int:
    """Of the driver, as nvidia-smi tells it; 13 where it says nothing."""
    try:
        job = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 13
    found = re.search(r"CUDA Version: *(\d+)", job.stdout)
    return int(found[1]) if found else 13


if __name__ == "__main__":
    main()
