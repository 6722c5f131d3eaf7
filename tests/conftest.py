"""Runs tests marked mpi(n) on n ranks, and gives tests a way to start MPI jobs.

The parent pytest never loads MPI. It starts one mpiexec per (file, n), in which every
rank is a pytest of its own that writes its reports to a file. The parent watches these
files, ends a launch that makes no progress, and launches again for the tests behind a
failed one.
"""

import atexit
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest
from launcher import (
    THREADS,
    Job,
    environment,
    members,
    mpiexec,
    run_job,
    signal_all,
)

# Set in a rank's pytest: the folder of its launch.
FOLDER = "MPIPAR_TEST_LAUNCH"
STARTING = 60.0
# Cases of a sweep that is a wide one
MANY = 8
DONE = pytest.StashKey[dict[str, list[pytest.TestReport]]]()


def pytest_configure(config: pytest.Config) -> None:
    _tame_hypothesis()
    if FOLDER in os.environ:
        config.pluginmanager.register(Rank(config, Path(os.environ[FOLDER])))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a wide sweep the full tier has every third case, by its name."""
    sweeps: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full"):
            sweeps.setdefault((item.path, item.originalname), []).append(item)
    for cases in sweeps.values():
        if len(cases) > MANY:
            for item in cases:
                if crc32(item.nodeid.encode()) % 3:
                    item.add_marker("exhaustive")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile all kernels before a test's clock runs; they are kept for later runs."""
    if FOLDER not in os.environ and session.items:
        code = "from mpipar.ops import make_ops\nfor p in ('fp64', 'fp32'):"
        subprocess.run([sys.executable, "-c", f"{code} make_ops('cpu', p)"], check=True)


def _tame_hypothesis() -> None:
    """Draw the same examples on every rank and leave no folder behind."""
    if "HYPOTHESIS_STORAGE_DIRECTORY" not in os.environ:
        folder = tempfile.mkdtemp(prefix="mpipar-hypothesis-")
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    from hypothesis import settings

    settings.register_profile("mpipar", derandomize=True, database=None, deadline=None)
    settings.load_profile("mpipar")


@pytest.fixture
def comm() -> Iterator:
    """A fresh duplicate of COMM_WORLD."""
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    """Call job(n, *words, timeout=60, cwd=None, **env) to run python words on n ranks.

    n = 0 runs it without mpiexec. A variable given as None is removed. BLAS threads are
    as the machine has them, not one.
    """
    with tempfile.TemporaryDirectory(prefix="mpipar-job-") as name:

        def run(
            n: int,
            *words: str,
            timeout: float = 60,
            cwd: Path | None = None,
            **changes: str | None,
        ) -> Job:
            command = [*mpiexec(), "-n", str(n)] if n else []
            until = time.monotonic() + timeout
            return run_job(
                [*command, *words],
                Path(name),
                environment(Path(name), **changes),
                lambda: time.monotonic() > until,
                cwd,
            )

        yield run


# --- parent ---------------------------------------------------------------------------


def _ranks_of(item: pytest.Item) -> int:
    """Ranks that a test asks for; 0 for a test without MPI."""
    marker = item.get_closest_marker("mpi")
    return marker.args[0] if marker else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> bool | None:
    """Replay a test's reports from its launch; launch if it has not run yet."""
    if FOLDER in os.environ or not _ranks_of(item):
        return None
    done = item.session.stash.setdefault(DONE, {})
    if item.nodeid not in done:
        alike = (item.path, _ranks_of(item))
        todo = [i for i in item.session.items if (i.path, _ranks_of(i)) == alike]
        done |= _launch([i for i in todo if i.nodeid not in done])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in done[item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What an earlier test of this process set up, and the next one does not need, ends.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _launch(items: list[pytest.Item]) -> dict[str, list[pytest.TestReport]]:
    """Run tests of one file and rank count; at least the first has reports then."""
    config, n = items[0].config, _ranks_of(items[0])
    command = [*mpiexec(), "-n", str(n), sys.executable, "-m", "pytest", "-q"]
    command += [f"--tb={config.option.tbstyle}", f"--rootdir={config.rootpath}"]
    if config.inipath:
        command += ["-c", str(config.inipath)]
    with tempfile.TemporaryDirectory(prefix="mpipar-tests-") as name:
        folder = Path(name)
        (folder / "wanted.json").write_text(json.dumps([i.nodeid for i in items]))
        env = environment(folder, **{FOLDER: name}, **dict.fromkeys(THREADS, "1"))
        watch = Watch(items, folder)
        job = run_job([*command, str(items[0].path)], folder, env, watch.is_late)
        return _judge(items, Records(folder, config), job)


class Records:
    """What the ranks of a launch have written so far."""

    def __init__(self, folder: Path, config: pytest.Config) -> None:
        self.started: set[str] = set()
        self.reports: dict[str, dict[int, list[pytest.TestReport]]] = {}
        self.stacks = {
            # Below the test's own frames come those of pytest.
            file.stem: file.read_text().partition("/_pytest/python.py")[0]
            for file in sorted(folder.glob("*.stack"))
        }
        hook = config.hook.pytest_report_from_serializable
        for file in sorted(folder.glob("*.jsonl")):
            # The last line may be half written.
            for line in file.read_text().split("\n")[:-1]:
                record = json.loads(line)
                if "start" in record:
                    self.started.add(record["start"])
                    continue
                report = hook(config=config, data=record["report"])
                if isinstance(report.longrepr, list):
                    # A skip's place and reason; JSON has no tuples.
                    report.longrepr = tuple(report.longrepr)
                ranks = self.reports.setdefault(report.nodeid, {})
                ranks.setdefault(record["rank"], []).append(report)

    def finished(self, nodeid: str) -> list[int]:
        """Ranks that are through with a test."""
        ranks = self.reports.get(nodeid, {})
        return [rank for rank, all_ in ranks.items() if all_[-1].when == "teardown"]


class Watch:
    """Knows when a launch has made no progress for as long as its test may take."""

    def __init__(self, items: list[pytest.Item], folder: Path) -> None:
        self.items, self.folder = items, folder
        self.size, self.since, self.limit = 0, time.monotonic(), STARTING

    def is_late(self) -> bool:
        """True once; the ranks have then been asked to write their stacks."""
        size = sum(file.stat().st_size for file in self.folder.glob("*.jsonl"))
        if size != self.size:
            self.size, self.since = size, time.monotonic()
            self.limit = self._patience()
        if time.monotonic() - self.since <= self.limit:
            return False
        pids = [int(file.read_text()) for file in self.folder.glob("*.pid")]
        signal_all([p for p in pids if p in members(self.folder)], signal.SIGUSR1)
        time.sleep(0.5)
        return True

    def _patience(self) -> float:
        """Seconds that the running test may take."""
        records = Records(self.folder, self.items[0].config)
        for item in self.items:
            if len(records.finished(item.nodeid)) < _ranks_of(item):
                started = item.nodeid in records.started
                marker = item.get_closest_marker("mpi")
                return marker.kwargs.get("timeout", 60) if started else STARTING
        return STARTING


def _judge(
    items: list[pytest.Item], records: Records, job: Job
) -> dict[str, list[pytest.TestReport]]:
    """Reports of the tests that ran; those behind a broken one have none yet."""
    n, done = _ranks_of(items[0]), {}
    for item in items:
        reports = records.reports.get(item.nodeid, {})
        whole = len(records.finished(item.nodeid)) == n
        done[item.nodeid] = _merge(reports, n)
        # A job that ends badly after its last test has no other test to blame.
        if whole and not (item is items[-1] and (job.status or job.left)):
            continue
        if not any(report.failed for report in done[item.nodeid]):
            done[item.nodeid].append(_death(item, records, job))
        if records.started:
            break
    return done


def _merge(
    ranks: dict[int, list[pytest.TestReport]], n: int
) -> list[pytest.TestReport]:
    """One report a phase: the first that failed, else passed, else skipped."""
    merged = []
    for when in ("setup", "call", "teardown"):
        phase = {
            rank: report
            for rank, reports in sorted(ranks.items())
            for report in reports
            if report.when == when
        }
        for outcome in ("failed", "passed", "skipped"):
            alike = {r: x for r, x in phase.items() if x.outcome == outcome}
            if alike:
                merged.append(_name_ranks(alike, n))
                break
    return merged


def _name_ranks(reports: dict[int, pytest.TestReport], n: int) -> pytest.TestReport:
    """The first of the reports; a failed one names its rank and quotes the others."""
    (rank, first), *others = reports.items()
    if first.failed:
        crash = getattr(first.longrepr, "reprcrash", None)
        if crash:
            crash.message = f"[rank {rank} of {n}] {crash.message}"
        first.sections.append((f"failed on rank {rank} of {n}", ""))
        for other, report in others:
            title = f"failed on rank {other} of {n}"
            first.sections.append((title, report.longreprtext))
    return first


def _death(item: pytest.Item, records: Records, job: Job) -> pytest.TestReport:
    """A failure for a test whose launch ended before all ranks reported."""
    why = "no progress in time" if job.late else f"the job ended with {job.status}"
    text = f"{why}; ranks that finished the test: {records.finished(item.nodeid)}\n"
    if job.left:
        text += f"processes that outlived the launcher: {job.left}\n"
    for rank, stack in records.stacks.items():
        text += f"\n--- {rank}, innermost call first\n{stack}\n" if stack else ""
    text += f"\n--- output of the job\n{job.output[-4000:]}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


# --- one rank of a launch -------------------------------------------------------------


class Rank:
    """The pytest of one rank: runs the wanted tests and writes down what happens."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        from mpi4py import MPI

        self.config, self.folder, self.world = config, folder, MPI.COMM_WORLD
        name = f"rank{self.world.rank:03d}"
        self.file = (folder / f"{name}.jsonl").open("w", buffering=1)
        self.stack = (folder / f"{name}.stack").open("w")
        faulthandler.register(signal.SIGUSR1, file=self.stack)
        (folder / f"{name}.pid").write_text(str(os.getpid()))
        config.option.basetemp = str(folder / name)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = json.loads((self.folder / "wanted.json").read_text())
        found = {item.nodeid: item for item in items}
        items[:] = [found[nodeid] for nodeid in wanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook.pytest_report_to_serializable
        data = hook(config=self.config, report=report)
        self._write(rank=self.world.rank, report=data)
        if report.failed:
            # The others may wait for this rank for ever. Those that fail too get a
            # moment to say so.
            time.sleep(0.3)
            self.world.Abort(1)

    def _write(self, **record: object) -> None:
        self.file.write(json.dumps(record) + "\n")
