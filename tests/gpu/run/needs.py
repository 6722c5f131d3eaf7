"""Prints what is missing for the run as pip names, a line each; standard library alone.

"?" before a name: the run goes on without it, and leaves out what it is for.
"""

import os
import re
import shutil
import subprocess
import sys
from ctypes.util import find_library
from importlib import import_module
from importlib.metadata import distributions
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
        missing += [cupy_package()] * (not works("cupy"))
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


def cupy_package() -> str:
    """CuPy for the newest CUDA that is installed and that the driver runs; where none
    is installed, with the driver's."""
    driver = 13 if driver_version() >= 13 else 12
    there = [major for major in packaged_versions() if major in (12, driver)]
    if there or has_toolkit():
        return f"cupy-cuda{max(there, default=driver)}x"
    return f"cupy-cuda{driver}x[ctk]"


def packaged_versions() -> set[int]:
    """CUDA versions whose headers are a package, as those are that PyTorch brings:
    CuPy compiles nothing without."""
    found = set()
    for package in distributions():
        name = (package.name or "").lower().replace("_", "-")
        if name.startswith("nvidia-cuda-runtime"):
            known = re.search(r"-cu(\d+)$", name) or re.match(r"(\d+)", package.version)
            found.add(int(known[1]))
    return found


def has_toolkit() -> bool:
    """Whether CUDA is installed beside Python's packages."""
    roots = os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"
    return any(Path(root).is_dir() for root in roots if root) or bool(
        find_library("nvrtc")
    )


def driver_version() -> int:
    """CUDA of the driver, as nvidia-smi tells it; 13 where it says nothing."""
    try:
        job = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 13
    found = re.search(r"CUDA Version: *(\d+)", job.stdout)
    return int(found[1]) if found else 13


if __name__ == "__main__":
    main()
