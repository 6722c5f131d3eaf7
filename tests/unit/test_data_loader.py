"""Workers give the same batches, know nothing of MPI, and never outlive the run."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mpipar.data import Loader, Sampler, TokenStream
from mpipar.errors import DataError


@pytest.fixture
def sampler():
    ids = np.arange(1000, dtype=np.uint16)
    return Sampler(TokenStream(ids, 16, 0.1, "numbers"), 3, 8, 4)


def ask(loader, expression):
    """Evaluate an expression in a worker."""
    return loader._pool.submit(eval, expression).result()


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for one, other in zip(batches, expected, strict=True):
        for field in ("tokens", "labels", "samples"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def test_workers_give_the_same_batches(sampler):
    """A35: in order, after a jump, and past the step told to be the last."""
    with Loader(sampler, workers=2, stop=20) as ahead, Loader(sampler, 0) as here:
        for step in [*range(20), 7, 8, 3, 19, 25]:
            expected = sampler.train_batches(step)
            assert_same(ahead.train_batches(step), expected)
            assert_same(here.train_batches(step), expected)
            assert len(ahead._ahead) <= 4
            assert not any(step >= 20 for step in ahead._ahead)
        assert_same(list(ahead.eval_batches()), list(sampler.eval_batches()))


def test_workers_know_nothing_of_mpi_or_of_the_main_script(sampler, monkeypatch):
    """A35: neither the module nor the launcher's variables reach them."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    with Loader(sampler, workers=1) as loader:
        loader.train_batches(0)
        assert dict(os.environ) == before
        modules = ask(loader, "list(__import__('sys').modules)")
        names = ask(loader, "list(__import__('os').environ)")
    assert "mpipar.data.sampler" in modules
    assert not [m for m in modules if m.split(".")[0] in ("mpi4py", "pytest", "h5py")]
    assert not [n for n in names if n.startswith(("PMI", "OMPI_", "SLURM_"))]


def test_a_killed_worker_is_named(sampler):
    """A35: a message, not a hang."""
    with Loader(sampler, workers=2) as loader:
        loader.train_batches(0)
        pid = ask(loader, "__import__('os').getpid()")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DataError, match=rf"process {pid} \(signal 9, SIGKILL\)"):
            for step in range(1, 100):
                loader.train_batches(step)


def test_a_worker_that_leaves_is_named(sampler):
    """A35: also when it ends by itself."""
    with Loader(sampler, workers=1) as loader:
        loader.train_batches(0)
        pid = ask(loader, "__import__('os').getpid()")
        loader._pool.submit(os._exit, 5)
        with pytest.raises(DataError, match=rf"process {pid} \(exit status 5\)"):
            for step in range(1, 100):
                loader.train_batches(step)


def test_signals_to_the_whole_job_do_not_stop_the_batches(sampler):
    """A35: a trainer told to save and stop still gets the batches of its last steps."""
    with Loader(sampler, workers=2) as loader:
        loader.train_batches(0)
        for number in (signal.SIGINT, signal.SIGUSR1):
            for worker in loader._processes:
                os.kill(worker.pid, number)
        assert_same(loader.train_batches(1), sampler.train_batches(1))
        assert all(worker.is_alive() for worker in loader._processes)
        for worker in loader._processes:
            worker.terminate()
        for step in range(2, 12):
            assert_same(loader.train_batches(step), sampler.train_batches(step))
        assert not any(worker.is_alive() for worker in loader._processes)


def test_closing_leaves_no_worker_behind(sampler):
    loader = Loader(sampler, workers=2)
    for step in range(3):
        loader.train_batches(step)
    workers = list(loader._processes)
    assert len(workers) == 2
    loader.close()
    loader.close()
    assert not set(workers) & set(multiprocessing.active_children())
    assert all(worker.exitcode == 0 for worker in workers)


TRAINER = """
import time
import numpy as np
from mpipar.data import Loader, Sampler, TokenStream
sampler = Sampler(TokenStream(np.arange(1000), 16, 0, "numbers"), 3, 8, 4)
loader = Loader(sampler, workers=1)
loader.train_batches(0)
print(loader._processes[0].pid, flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
def test_workers_go_when_their_trainer_is_killed():
    """A35: an aborted run leaves no process that holds its terminal."""
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pid = int(trainer.stdout.readline())
        assert is_running(pid)
        trainer.kill()
    end = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)
