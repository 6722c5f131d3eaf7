"""Generation with a key/value cache on one rank or tensor-parallel ranks."""

from mpipar.generate.run import run_generation

__all__ = ["run_generation"]
