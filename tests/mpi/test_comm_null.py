"""One rank alone: no MPI needed."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from mpipar.comm import Communicator, NullCommunicator, P, R, S, reshard
from mpipar.errors import CommError


def test_collectives_of_one_rank_are_identities():
    axis, x = NullCommunicator("tp"), np.arange(6.0).reshape(2, 3)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        assert getattr(axis, op)(x) is x
    for op in ("all_reduce_start", "all_gather_start", "reduce_scatter_start"):
        handle = getattr(axis, op)(x)
        assert handle.test() and handle.wait() is x
    assert axis.all_gather_obj(3) == axis.gather_obj(3) == [3]
    assert axis.broadcast_obj(3) == 3
    for move in [(S(1), R), (P, R), (P, S(0)), (R, S(1)), (S(0), S(1)), (R, P)]:
        assert reshard(x, *move, axis) is x


def test_a_ring_of_one_hands_its_array_to_itself():
    axis, out = NullCommunicator("cp"), np.zeros(2)
    assert axis.send_recv(np.ones(2), 0, out, 0) is out
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize("op", ["send", "recv", "send_start", "recv_start"])
def test_a_lone_message_is_refused(op):
    with pytest.raises(CommError, match="axis pp has one rank"):
        getattr(NullCommunicator("pp"), op)(np.zeros(2), 0)


def test_both_communicators_have_the_same_methods():
    for name, method in inspect.getmembers(Communicator, inspect.isfunction):
        if not name.startswith("_"):
            null = getattr(NullCommunicator, name)
            assert list(inspect.signature(null).parameters) == list(
                inspect.signature(method).parameters
            ), name


def test_importing_the_rooms_and_one_rank_alone_never_load_mpi():
    program = (
        "import sys; from mpipar.comm import Communicator, reshard;"
        "from mpipar.grid import Grid, serial_grid;"
        "serial_grid().tp.all_reduce(None); sys.exit('mpi4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
