"""metrics.jsonl, a line for every step, and summary.json at the end."""

import json
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

from mpipar.comm import file_work
from mpipar.config import Recipe
from mpipar.engine import Engine, StepResult, finite
from mpipar.train.saves import Saves


class Metrics:
    """Measures the steps of this rank, and writes them down where `writes` is set.

    peak_flops   matrix-product rate of one rank in FLOP/s, which mfu is a share of
    saves        knows the labels that have counted so far, and holds some state itself
    step         where the run begins: lines of an earlier run up to there stay
    working_s    seconds of the last step in which this rank did not wait for others
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        peak_flops: float,
        saves: Saves,
        step: int,
        writes: bool,
    ) -> None:
        self.engine, self.peak_flops, self.saves = engine, peak_flops, saves
        self._file, self._last = None, 0
        self.working_s = 0.0
        if writes:
            file = folder / "metrics.jsonl"
            with file_work("writing", file):
                _keep_until(step, file)
                self._file = file.open("a", encoding="utf-8")
        self._predicted = engine.predicted_memory()
        if saves.copies:
            self._predicted["copies"] = saves.copies.predicted
        # Long schedules take a while: only the line that is written needs it.
        self._bubble = engine.simulate().bubble if writes else 0.0
        self._mark = self._counts()
        self._clock = time.perf_counter()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def restart_clock(self) -> None:
        """Time spent since the last line belongs to no step (evaluation, saving)."""
        self._clock = time.perf_counter()
        self._mark = self._counts()

    def record(self, result: StepResult, tokens: int) -> dict[str, Any]:
        """The line of the step that just ended, written once complete."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        before, self._mark = self._mark, self._counts()
        comm = self.engine.grid.counters.since(before)
        self.working_s = seconds - _waits(self._mark) + _waits(before)
        copies = self.saves.copies
        return {
            "step": self.engine.number,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "updated": result.updated,
            "loss_scale": result.loss_scale,
            "tokens": self.saves.tokens(),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": self.engine.step_flops() / seconds / self.peak_flops,
            "bubble": result.bubble,
            "bubble_predicted": self._bubble,
            "memory": memory(self.engine)
            | {"snapshot": self.saves.saver.snapshot.nbytes}
            | ({"copies": copies.nbytes} if copies else {}),
            "memory_predicted": self._predicted,
            "comm": comm,
            **_experts(result),
        }

    def write(self, line: dict[str, Any], *, again: bool = False) -> None:
        """Appends one line; it is in the file when this returns.

        A number that is not finite is written as null.

        again   in the place of the line before, which is of the same step
        """
        if self._file is None:
            return
        with file_work("writing", self._file.name):
            if again:
                self._file.truncate(self._last)
            self._last = os.fstat(self._file.fileno()).st_size
            self._file.write(json.dumps(_strict(line), allow_nan=False) + "\n")
            self._file.flush()

    def _counts(self) -> Any:
        return self.engine.grid.counters.snapshot()


def _waits(counts: dict[tuple[str, str], tuple]) -> float:
    """Seconds waited, of a snapshot of counters."""
    return sum(wait for _, _, _, wait in counts.values())


def _experts(result: StepResult) -> dict[str, Any]:
    """How evenly the tokens of a step were spread over experts, where there are any."""
    found = {}
    for name, counts in result.loads.items():
        loads, dropped = counts[:-1], counts[-1]
        total = max(float(loads.sum()), 1.0)
        found[name] = {
            "tokens": [int(n) for n in loads],
            "dropped": float(dropped) / total,
            "imbalance": float(loads.max()) * len(loads) / total,
        }
    return {"experts": found} if found else {}


def _keep_until(step: int, file: Path) -> None:
    """Leaves the lines of steps that a run which goes on does not repeat."""
    draft = file.with_name(file.name + ".tmp")
    with draft.open("w", encoding="utf-8") as kept:
        if step and file.exists():
            with file.open(encoding="utf-8", errors="replace") as lines:
                lines = (line for line in lines if _step_of(line) <= step)
                kept.writelines(line.rstrip("\n") + "\n" for line in lines)
    draft.replace(file)


def _step_of(line: str) -> float:
    """The step of a line; infinite where it was cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def memory(engine: Engine) -> dict[str, int]:
    """Bytes of the arrays this rank holds, the peak of its resident memory, and on a
    GPU those of the device."""
    held = engine.held_memory()
    del held["activations"]
    return {
        **held,
        "activations_peak": engine.executor.peak_bytes,
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **engine.ops.device_memory(),
    }


def write_summary(folder: Path, recipe: Recipe, facts: dict[str, Any]) -> None:
    """summary.json: how the run ended, in a few numbers."""
    summary = {"layout": recipe.parallel.axes, **_strict(facts)}
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    file = folder / "summary.json"
    with file_work("writing", file):
        file.write_text(text, encoding="utf-8")


def _strict(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with null for numbers that are not finite."""
    return {k: finite(v) if isinstance(v, float) else v for k, v in facts.items()}
