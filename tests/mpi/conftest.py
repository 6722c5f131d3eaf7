"""What tests of the communicators share."""

from collections.abc import Iterator

import pytest

from mpipar.comm.bell import Bell


@pytest.fixture(params=["waits in MPI", "waits asleep"])
def bell(comm, request) -> Iterator[Bell | None]:
    """How ranks wait: None when they do not outnumber cores, a bell when they do."""
    if request.param == "waits in MPI":
        yield None
        return
    bell = Bell(comm)
    yield bell
    bell.close()
