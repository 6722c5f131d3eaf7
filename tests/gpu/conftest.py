"""Products of CUDA ops go through a cuBLASLt that computes on the CPU."""

import pytest
from gpu.shim.compile import GXX, cublaslt

from mpipar.ops.cuda.cublaslt import VARIABLE


@pytest.fixture(autouse=True)
def library_of_products(monkeypatch):
    if GXX is not None:
        monkeypatch.setenv(VARIABLE, cublaslt())
