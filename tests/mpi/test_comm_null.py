"""One rank alone, and arrays of a device: no MPI needed."""

import inspect
import subprocess
import sys
import types

import numpy as np
import pytest

from mpipar.comm import Communicator, NullCommunicator, P, R, S, Staged, reshard
from mpipar.errors import CommError, DeviceError


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


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy that knows which arrays are on the device."""

    class DeviceArray:
        def __init__(self, values):
            self.values, self.shape = np.array(values), np.shape(values)

        def __setitem__(self, key, other):
            assert isinstance(other, DeviceArray)
            self.values[key] = other.values

    synced = []
    stream = types.SimpleNamespace(synchronize=lambda: synced.append(True))
    module = types.ModuleType("cupy")
    module.ndarray = DeviceArray
    module.asarray = DeviceArray
    module.asnumpy = lambda x, order: np.array(x.values, order=order)
    module.cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    module.synced = synced
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_device_arrays_are_staged_through_host_memory(cupy):
    transport, x = Staged(), cupy.asarray(np.arange(6.0).reshape(2, 3).T)
    host = transport.pull(x)
    assert host.flags.c_contiguous and cupy.synced
    cupy.synced.clear()
    transport.push(host.reshape(-1) + 1, x)
    assert x.values.tolist() == [[1, 4], [2, 5], [3, 6]] and cupy.synced
    assert isinstance(transport.give(host, x), cupy.ndarray)
    assert transport.pull(host) is host and transport.give(host, host) is host
    with pytest.raises(DeviceError, match=r"builtins\.list"):
        transport.pull([1.0])
