"""mpi4py's MPI module, loaded at first use: loading it starts MPI.

``from mpipar.comm import mpi`` costs nothing; ``mpi.SUM`` loads it, and is afterwards
as fast as any attribute. So the whole package can be imported where MPI must not run.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from mpi4py import MPI

    globals()[name] = getattr(MPI, name)
    return globals()[name]
