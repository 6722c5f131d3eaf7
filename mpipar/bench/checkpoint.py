"""How fast a state is saved and loaded, beside the disk's own rate in the same run."""

import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.bench.report import machine, write_together
from mpipar.bench.state import KINDS, SharedState
from mpipar.checkpoint import Facts, Progress, Saved, Saver, load, read_manifest
from mpipar.checkpoint.files import flush
from mpipar.comm import raise_together
from mpipar.errors import CheckpointError, ConfigError
from mpipar.grid import Grid
from mpipar.ops import Ops, make_ops

DONE, FAILED = 0, 1
GB, MB = 10**9, 10**6
# Seconds of matrix products in a step, and their width
STEP_S = 0.15
_WIDTH = 768
# Seconds between looks at what one waits for politely
_LOOK_S = 0.005
# Bytes of a write, as dd is told
_WRITE = 4 << 20
_LEAST_GB = 0.0001


@dataclass(frozen=True)
class Round:
    """One round, the longest time of any rank each. Seconds.

    disk_s      dd writes a file of as many bytes and flushes it
    save_s      a save that all wait for
    async_s     a save with steps going on, start to end;  exposed_s  of them waited
    steps       made meanwhile;  with_s  what they took;  without_s  as many without it
    load_s      of all that was saved
    buffer_bytes   of copies that the save held, sum over ranks
    is_equal    what was loaded is what was saved, each time
    """

    disk_s: float
    save_s: float
    async_s: float
    exposed_s: float
    steps: int
    with_s: float
    without_s: float
    load_s: float
    buffer_bytes: int
    is_equal: bool


@dataclass(frozen=True)
class Summary:
    """Medians over rounds. Rates in bytes per second, shares of the same round.

    save_to_disk     rate of the synchronous save over that of dd
    exposed_share    of the synchronous save's seconds;  slowdown_share  likewise
    slowdown_s       what the steps took longer because of the save
    """

    disk_rate: float
    save_rate: float
    save_to_disk: float
    async_s: float
    exposed_s: float
    exposed_share: float
    steps: float
    slowdown_s: float
    slowdown_share: float
    load_rate: float
    buffer_bytes: float
    is_equal: bool


def run_checkpoint(
    world: Any,
    *,
    gb: float = 1.0,
    folder: Path = Path(),
    rounds: int = 5,
    json_path: Path | None = None,
) -> int:
    """Measures saves and loads of a state; rank 0 prints the table. Collective.

    gb        size of the state of all ranks, in 10⁹ bytes
    folder    on the disk to measure; nothing is left there
    Returns   0, or 1 where what was loaded is not what was saved
    Raises    ConfigError or CheckpointError on all ranks together
    """
    with Grid(world, {"dp": world.size}) as grid:
        raise_together(_complaint(gb, rounds), grid.world)
        with _work_folder(folder, grid.world) as own:
            ops = make_ops("cpu", "fp32")
            state = SharedState(int(gb * GB), grid.world.rank, grid.world.size)
            with Saver(own, grid.world, ops) as saver:
                bench = _Bench(state, saver, ops)
                # The first round touches memory and code that the others find
                taken = [bench.round() for _ in range(1 + rounds)]
        summary, facts = summarize(state.nbytes, taken), None
        if grid.world.rank == 0:
            show(summary, state.nbytes, grid.describe(), rounds)
            facts = _facts(state.nbytes, grid.size, summary, taken)
        write_together(json_path, facts, grid.world)
    return DONE if summary.is_equal else FAILED


def _complaint(gb: float, rounds: int) -> ConfigError | None:
    """What is wrong with the command."""
    reasons = []
    if not _LEAST_GB <= gb < math.inf:
        reasons.append(f"--gb = {gb} must be at least {_LEAST_GB}")
    if rounds < 1:
        reasons.append(f"--rounds = {rounds} must be at least 1")
    return ConfigError(reasons, "the command") if reasons else None


@contextmanager
def _work_folder(parent: Path, world: Any) -> Iterator[Path]:
    """A new folder below `parent`, the same for all ranks, that does not stay."""
    name, error = "", None
    try:
        if world.rank == 0:
            try:
                name = tempfile.mkdtemp(prefix="mpipar-bench-", dir=parent)
            except OSError as problem:
                reason = f"--folder {parent} cannot be written: {problem.strerror}"
                error = ConfigError([reason], "the command")
        raise_together(error, world)
        name = world.broadcast_obj(name)
        yield Path(name)
    finally:
        # By every rank: one that fails alone ends the others before they come here
        if name:
            shutil.rmtree(name, ignore_errors=True)


class _Bench:
    """The parts of a round; each begins when all ranks are there."""

    def __init__(self, state: SharedState, saver: Saver, ops: Ops) -> None:
        self.state, self.saver, self.ops = state, saver, ops
        self.world, self.folder = saver.world, saver.run
        self.fragments = state.fragments()
        self.junk = saver.run / "junk"
        shape = (_WIDTH, _WIDTH)
        self.factors = [np.full(shape, 0.5, np.float32) for _ in "ab"]
        slowest = -self._largest(-ops.matmul_rate())
        self.products = max(1, round(STEP_S * slowest / (2 * _WIDTH**3)))

    def round(self) -> Round:
        """Writes, saves, steps and loads."""
        self._settle()
        disk_s = self._on_first(lambda: write_zeros(self.junk, self.state.nbytes))

        sums = self.state.sums()
        self._settle()
        self._begin()
        saved = _good(self.saver.finish())
        load_s, was_equal = self._load(saved.folder, sums)

        sums = self.state.sums()
        self._settle()
        beside, steps, with_s = self._save_beside_steps()
        without_s = self._steps_alone(steps)
        _, is_equal = self._load(beside.folder, sums)

        buffers = np.array([float(self.saver.snapshot.nbytes)])
        return Round(
            disk_s=disk_s,
            save_s=self._largest(saved.seconds),
            async_s=self._largest(beside.seconds),
            exposed_s=self._largest(beside.exposed_seconds),
            steps=steps,
            with_s=self._largest(with_s),
            without_s=self._largest(without_s),
            load_s=load_s,
            buffer_bytes=int(self.world.all_reduce(buffers)[0]),
            is_equal=was_equal and is_equal,
        )

    def _begin(self) -> None:
        facts = Facts("bench", "", "", Progress(step=1))
        self.saver.begin(facts, self.fragments, KINDS)

    def _save_beside_steps(self) -> tuple[Saved, int, float]:
        """A save while steps go on: what it came to, steps and their seconds."""
        began, saved, steps = time.perf_counter(), None, 0
        self._begin()
        while saved is None:
            steps += 1
            if self._step() == self.world.size:
                saved = _good(self.saver.advance())
        return saved, steps, time.perf_counter() - began

    def _steps_alone(self, steps: int) -> float:
        """Seconds of so many steps."""
        self.world.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        return time.perf_counter() - began

    def _step(self) -> int:
        """A step as a training run makes it; how many ranks were ready at its end."""
        for _ in range(self.products):
            self.ops.linear_fwd(*self.factors)
        ready = self.world.all_reduce(np.array([float(self.saver.ready)]))
        self.saver.freeze()
        self.state.update()
        return int(ready[0])

    def _load(self, folder: Path, sums: Sequence[str]) -> tuple[float, bool]:
        """Loads what has these checksums: seconds, and whether it had."""
        self.state.clear()
        self.world.barrier()
        began = time.perf_counter()
        load(folder, read_manifest(folder), self.fragments, self.ops)
        seconds = self._largest(time.perf_counter() - began)
        return seconds, not self._largest(float(self.state.sums() != sums))

    def _settle(self) -> None:
        """Removes all files, and lets the next write find what every one finds.

        No journal has to tell of what was removed, and memory for the page cache has
        just been in use: a hypervisor takes back what is not, and is slow to return it.
        """

        def tidy() -> None:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            write_zeros(self.junk, self.state.nbytes, durable=False)
            self.junk.unlink()
            flush(self.folder)

        self._on_first(tidy)

    def _on_first(self, action: Callable[[], None]) -> float:
        """Seconds of an action of rank 0, during which the others sleep."""
        error, seconds = None, 0.0
        self.world.barrier()
        if self.world.rank == 0:
            began = time.perf_counter()
            try:
                action()
            except OSError as problem:
                error = CheckpointError(f"cannot write to {self.folder}: {problem}")
            seconds = time.perf_counter() - began
        told = self.world.all_reduce_start(np.array([seconds]))
        while not told.test():
            time.sleep(_LOOK_S)
        raise_together(error, self.world)
        return float(told.wait()[0])

    def _largest(self, number: float) -> float:
        return float(self.world.all_reduce(np.array([number]), "max")[0])


def write_zeros(file: Path, size: int, *, durable: bool = True) -> None:
    """Writes `size` bytes by dd, or as it does where there is none; flushes them.

    Raises OSError.
    """
    if shutil.which("dd") is None:
        with file.open("wb", buffering=0) as out:
            for place in range(0, size, _WRITE):
                out.write(bytes(min(_WRITE, size - place)))
            if durable:
                os.fsync(out.fileno())
        return
    words = ["dd", "if=/dev/zero", f"of={file}", f"bs={_WRITE}", f"count={size}"]
    words += ["iflag=count_bytes", "status=none", *["conv=fsync"] * durable]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


def _good(saved: Saved | None) -> Saved | None:
    """What a save has come to so far; raises its error, on all ranks together."""
    if saved is not None and saved.error is not None:
        raise saved.error
    return saved


def summarize(size: int, taken: Sequence[Round]) -> Summary:
    """Medians of rounds with a state of so many bytes, the first one left out."""

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, taken[1:]))

    return Summary(
        disk_rate=size / median(lambda r: r.disk_s),
        save_rate=size / median(lambda r: r.save_s),
        save_to_disk=median(lambda r: r.disk_s / r.save_s),
        async_s=median(lambda r: r.async_s),
        exposed_s=median(lambda r: r.exposed_s),
        exposed_share=median(lambda r: r.exposed_s / r.save_s),
        steps=median(lambda r: r.steps),
        slowdown_s=median(lambda r: r.with_s - r.without_s),
        slowdown_share=median(lambda r: (r.with_s - r.without_s) / r.save_s),
        load_rate=size / median(lambda r: r.load_s),
        buffer_bytes=median(lambda r: r.buffer_bytes),
        is_equal=all(r.is_equal for r in taken),
    )


def show(s: Summary, size: int, layout: str, rounds: int) -> None:
    """Prints the medians as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    for head in ("seconds", "MB/s", "that is"):
        table.add_column(head, justify="right")

    def add(what: str, seconds: float, note: str, *, has_rate: bool = False) -> None:
        rate = f"{size / seconds / MB:.0f}" if has_rate else ""
        table.add_row(what, f"{seconds:.3f}", rate, note)

    disk = f"{s.save_to_disk:.0%} of dd"
    add("dd, one file", size / s.disk_rate, "", has_rate=True)
    add("synchronous save", size / s.save_rate, disk, has_rate=True)
    add("asynchronous save", s.async_s, f"over {s.steps:.0f} steps")
    add("  waited for", s.exposed_s, f"{s.exposed_share:.1%} of the synchronous one")
    add("  steps longer by", s.slowdown_s, f"{s.slowdown_share:.1%} of it")
    add("load", size / s.load_rate, "from the page cache", has_rate=True)
    console = Console(highlight=False)
    console.print(f"{size / GB:.3f} GB on {layout}, medians of {rounds} rounds")
    console.print(table)
    equal = "is what was saved" if s.is_equal else "FAILED: is not what was saved"
    console.print(
        f"copies held meanwhile {s.buffer_bytes / MB:.0f} MB, all ranks together; "
        f"what was loaded {equal}",
        soft_wrap=True,
    )


def _facts(
    size: int, ranks: int, summary: Summary, taken: Sequence[Round]
) -> dict[str, Any]:
    """Every round, for --json."""
    warm_up, *rounds = (asdict(one) for one in taken)
    facts = {"bytes": size, "ranks": ranks, "step_s": STEP_S, "machine": machine()}
    return facts | {"medians": asdict(summary), "warm_up": warm_up, "rounds": rounds}
