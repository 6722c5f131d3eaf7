"""Which way arrays of GPUs travel, and which GPU a rank takes."""

import subprocess

import pytest

from mpipar.cli import device
from mpipar.cli.gpus import judge_transports
from mpipar.comm import cuda_aware
from mpipar.comm.choice import Place, memory_share, nccl_obstacle, shared_devices


@pytest.fixture
def library(monkeypatch):
    """What the MPI library answers, by name of the question."""

    def answering(**answers):
        class Library:
            def __init__(self, file):
                if "Query" in answers:
                    self.MPIX_Query_cuda_support = lambda: answers["Query"]
                if "GPU" in answers:
                    self.MPIX_GPU_query_support = self.gpu

            def gpu(self, kind, found):
                assert kind == 0
                found._obj.value = answers["GPU"]
                return 0

        monkeypatch.setattr(cuda_aware.ctypes, "CDLL", Library)
        return ["libmpi.so"]

    return answering


@pytest.mark.parametrize(
    ("env", "answers", "reason"),
    [
        ({}, {"Query": 1}, None),
        ({}, {"GPU": 1, "Query": 0}, None),
        ({}, {"Query": 0}, "without CUDA"),
        ({}, {"GPU": 0}, "without CUDA"),
        ({}, {}, "does not say"),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, {}, None),
        ({"MV2_USE_CUDA": "1"}, {}, None),
        ({"MVP_USE_CUDA": "1"}, {}, None),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, {"Query": 0}, "without CUDA"),
        ({"MPIR_CVAR_ENABLE_GPU": "0"}, {"Query": 1}, "MPIR_CVAR_ENABLE_GPU = 0"),
        ({"MV2_USE_CUDA": "0"}, {"Query": 1}, "MV2_USE_CUDA = 0"),
        ({"MPIPAR_CUDA_AWARE": "1"}, {"Query": 0}, None),
        ({"MPIPAR_CUDA_AWARE": "0"}, {"Query": 1}, "MPIPAR_CUDA_AWARE = 0"),
        ({"MPIPAR_CUDA_AWARE": "yes"}, {"Query": 1}, None),
    ],
)
def test_library_and_variables_say_whether_mpi_takes_device_memory(
    library, env, answers, reason
):
    found = cuda_aware.claim(env, library(**answers))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('same')", None),
        ("print('other')", "failed: other"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "by signal 11"),
        ("import time; time.sleep(60)", "did not end in 0.5 s"),
        ("raise ValueError('no device')", "failed: ValueError: no device"),
        ("import os; print('same' if 'PMI_RANK' not in os.environ else 'rank')", None),
    ],
)
def test_a_trial_that_crashes_or_hangs_is_no(code, reason):
    limit = 0.5 if reason and "end" in reason else 30.0
    found = cuda_aware.trial({"PMI_RANK": "1"}, 0, code, limit)
    assert found is None if reason is None else reason in found


def test_a_trial_that_cannot_start_is_no():
    def run(*_, **__):
        raise OSError("no memory")

    assert "could not start: no memory" in cuda_aware.trial({}, 0, run=run)
    assert subprocess.run is not run


def test_ranks_that_share_a_gpu_are_named_and_have_no_nccl():
    a, b = Place("n1", "01", None), Place("n1", "02", None)
    assert nccl_obstacle([a, b, Place("n2", "01", None)]) is None
    shared = "ranks 0, 2 share GPU 01 of n1"
    assert shared_devices([a, b, a]) == [shared]
    assert nccl_obstacle([a, b, a]) == f"NCCL wants a GPU for each rank: {shared}"
    assert nccl_obstacle([a, Place("n2", "", "no library")]) == "no library on n2"
    found = judge_transports("no library", "built without", [])
    assert found.state == "warn" and "no NCCL: no library" in found.text
    assert judge_transports(None, None, []).text.startswith("NCCL; CUDA-aware MPI")
    assert judge_transports("shared", None, [shared]).text.startswith(shared)


def test_ranks_that_share_a_gpu_share_its_memory():
    gib = 1 << 30
    assert memory_share(80 * gib, 1) is None
    assert memory_share(80 * gib, 4) == 19 * gib
    assert memory_share(4 * gib, 4) == gib // 2


@pytest.mark.parametrize("name", device._PLACES)
def test_the_place_on_the_node_is_what_launchers_say(name):
    assert device.place_on_node({name: "3"}) == 3
    assert device.place_on_node({name: "all"}) is None


def test_each_rank_of_a_node_takes_the_next_device():
    places = [0, 1, 2, 3] * 2  # two nodes
    assert [device.device_of(p, 4) for p in places] == [0, 1, 2, 3] * 2
    assert [device.device_of(p, 2) for p in places] == [0, 1, 0, 1] * 2
    assert [device.device_of(p, 1) for p in places] == [0] * 8


class Driver:
    """The calls of the CUDA driver that choose a device."""

    def __init__(self, devices, status=0):
        self.devices, self.status, self.chosen = devices, status, []

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.devices
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = 40 + number
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 + device.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.chosen.append(context.value)
        return 0


def test_a_device_is_taken_before_mpi_takes_one():
    env = {"SLURM_LOCALID": "5", "MPICH_GPU_SUPPORT_ENABLED": "1"}
    driver = Driver(4)
    assert device.bind_device(env, driver) == 1 and driver.chosen == [141]
    assert device.bind_device(env, Driver(1)) == 0
    assert device.bind_device(env, Driver(0)) is None
    assert device.bind_device(env, Driver(4, status=100)) is None
    assert device.bind_device({"SLURM_LOCALID": "5"}, driver) is None
    assert device.bind_device({"MPICH_GPU_SUPPORT_ENABLED": "1"}, driver) is None
    assert driver.chosen == [141]


def test_a_place_that_mpi_denies_is_told():
    env = {"SLURM_LOCALID": "1", "MPICH_GPU_SUPPORT_ENABLED": "1"}
    assert "rank 1 of its node, MPI says 0" in device.place_warning(env, 0)
    assert device.place_warning(env, 1) is None
    assert device.place_warning({"SLURM_LOCALID": "1"}, 0) is None
