"""Batches prepared ahead of time, in processes that know nothing of MPI."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from mpipar.comm import file_work
from mpipar.data.sampler import Batch, Sampler
from mpipar.errors import DataError

# By these a process believes it is a rank of an MPI job
_LAUNCHER = ("PMI", "OMPI_", "OPAL_", "PRTE_", "MPI_", "HYDRA_", "HYDI_", "SLURM_")
_LAUNCHER += ("PALS_", "I_MPI_", "MV2_", "FLUX_")
# Sent to every process of a job, but meant for the trainer
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STEPS_AHEAD = 2


class Loader:
    """Micro-batches of a sampler, step by step.

    Without workers batches are made when asked for. With workers, started by spawn
    (never a fork, which MPI does not survive), up to 2 · workers steps are prepared
    ahead; the batches are the same. A worker has a copy of text that is in memory; a
    token file it maps itself.

    stop    first step that is not wanted: nothing is prepared from there on
    Raises  DataError naming the process when a worker dies. Only if all were ended by
            SIGTERM, as a batch system does to a whole job that is to save and stop,
            the batches still wanted are made in this process
    """

    def __init__(self, sampler: Sampler, workers: int, stop: int | None = None) -> None:
        self.sampler = sampler
        self.workers = workers
        self.stop = sys.maxsize if stop is None else stop
        self._ahead: dict[int, Future[list[Batch]]] = {}
        self._processes: list[BaseProcess] = []
        self._pool = None
        if workers:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, spawn, _enter, (sampler,))

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step, as Sampler.train_batches does."""
        source = self.sampler.stream.source
        if self._pool is None:
            with file_work("reading a batch from", source):
                return self.sampler.train_batches(step)
        try:
            wanted = range(step, min(self.stop, step + _STEPS_AHEAD * self.workers))
            self._prepare({step, *wanted})
            with file_work("waiting for a data worker that reads", source):
                return self._ahead.pop(step).result()
        except BrokenProcessPool as error:
            self._bury_workers(error)
            return self.sampler.train_batches(step)

    def eval_batches(self) -> Iterator[Batch]:
        """Yield this rank's held-out micro-batches, made in this process."""
        source, batches = self.sampler.stream.source, self.sampler.eval_batches()
        while True:
            with file_work("reading a batch from", source):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End the workers; steps being prepared are dropped."""
        self._ahead.clear()
        if self._pool is not None:
            source = self.sampler.stream.source
            with file_work("waiting for a data worker that reads", source):
                self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, wanted: set[int]) -> None:
        # After a jump what was prepared is of no use
        for step in self._ahead.keys() - wanted:
            self._ahead.pop(step).cancel()
        for step in sorted(wanted - self._ahead.keys()):
            self._ahead[step] = self._submit(step)

    def _submit(self, step: int) -> "Future[list[Batch]]":
        # The pool starts its processes inside submit, until there are enough
        if len(self._processes) == self.workers:
            return self._pool.submit(_train_batches, step)
        before = multiprocessing.active_children()
        with _sheltered():
            future = self._pool.submit(_train_batches, step)
        children = multiprocessing.active_children()
        self._processes += [child for child in children if child not in before]
        return future

    def _bury_workers(self, error: BrokenProcessPool) -> None:
        # Once all are gone their causes are known; the pool ends the rest by SIGTERM
        self.close()
        self._pool = None
        gone = {p.pid: p.exitcode for p in self._processes}
        causes = [
            f"process {pid} ({_cause(code)})"
            for pid, code in gone.items()
            if code != -signal.SIGTERM
        ]
        if causes:
            raise DataError(f"a data worker died: {', '.join(causes)}") from error


def _cause(exitcode: int) -> str:
    if exitcode < 0:
        return f"signal {-exitcode}, {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


@contextlib.contextmanager
def _sheltered() -> Iterator[None]:
    """Let new processes see neither the main script nor the signals to the whole job.

    The main script may import MPI, and spawn reruns it in each child unless it has no
    file. Signals blocked here stay blocked in a child from its first moment.
    """
    main = sys.modules["__main__"]
    # The tracker that spawn brings up unblocks SIGINT, so it has to be there before
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# The sampler of a worker process, set once when it starts
_sampler: Sampler | None = None


def _enter(sampler: Sampler) -> None:
    global _sampler
    _sampler = sampler
    for name in [name for name in os.environ if name.startswith(_LAUNCHER)]:
        del os.environ[name]
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this process when its trainer is gone, however that ended."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _train_batches(step: int) -> list[Batch]:
    return _sampler.train_batches(step)
