"""Medians, ratios and losses of the contestants, as a table and as JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpipar.bench.contestants import ONE_CORE, REFERENCE, TORCH, Contestant
from mpipar.bench.rival import Rival
from mpipar.engine import finite

# The first steps, which all contestants make from the same weights.
COMPARED = 4
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
_MIB = 1 << 20
_HEADS = (
    "ms/step", "tokens/s", "× eager", "× best", "peak MiB", "PSS MiB", "loss",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What one contestant did. Times in seconds, memory in bytes of all processes.

    seconds   of every timed step;  losses  of every step
    facts     versions and threads of its first process
    """

    contestant: Contestant
    seconds: Sequence[float]
    losses: Sequence[float]
    tokens: int
    memory: Mapping[str, int]
    facts: Mapping[str, Any]

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def group(self) -> tuple[str, str, bool]:
        """Those it can fairly be compared with: device, precision, one core or all."""
        c = self.contestant
        return c.device, c.precision, c.spread == ONE_CORE

    @property
    def peak(self) -> int:
        """Largest resident memory, from the start to the last step."""
        return max(self.memory["start_peak"], self.memory["steps_peak"])


def result(rival: Rival, tokens: int) -> Result:
    """What a rival did, at so many tokens a step."""
    return Result(
        rival.contestant,
        rival.seconds,
        rival.losses,
        tokens,
        rival.memory,
        rival.facts,
    )


class Table:
    """All contestants in order, those that ran and those that did not.

    results   by name;  reasons  why the others did not run, by name
    judged    whether all began with the same weights, so that losses must agree
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        results: Mapping[str, Result],
        reasons: Mapping[str, str],
        *,
        judged: bool = True,
    ) -> None:
        self.contestants, self.results = contestants, results
        self.reasons, self.judged = reasons, judged
        self.deviations = {name: self._deviation(r) for name, r in results.items()}

    @property
    def disagreeing(self) -> list[str]:
        """Contestants whose losses show that they did other work."""
        return [
            name
            for name, deviation in self.deviations.items()
            if self.judged and not deviation <= self._tolerance(self.results[name])
        ]

    def to_reference(self, r: Result) -> float | None:
        """Speed as a multiple of PyTorch eager with all cores."""
        base = self.results.get(REFERENCE)
        return base and base.median / r.median

    def to_best(self, r: Result) -> float | None:
        """Speed as a multiple of PyTorch's best in the same precision and cores."""
        best = [
            other.median
            for other in self.results.values()
            if other.contestant.library == TORCH and other.group == r.group
        ]
        return min(best) / r.median if best else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, with every single timing and loss."""
        return {
            "reference": self._reference and self._reference.contestant.name,
            "disagreeing": self.disagreeing,
            "contestants": [self._entry(c) for c in self.contestants],
        }

    def show(self, title: str) -> None:
        """Print the table, and how far the losses are apart."""
        from rich.console import Console
        from rich.table import Table as Grid

        console = Console(highlight=False)
        grid = Grid(box=None, pad_edge=False, collapse_padding=True)
        grid.add_column("contestant", no_wrap=True)
        for head in _HEADS:
            grid.add_column(head, justify="right", no_wrap=True)
        for c in self.contestants:
            r = self.results.get(c.name)
            grid.add_row(c.name, *(self._cells(r) if r else ("-",) * len(_HEADS)))
        console.print(title)
        console.print(grid)
        for name, reason in self.reasons.items():
            console.print(f"not run: {name}: {reason}", markup=False, soft_wrap=True)
        for line in self.verdict():
            console.print(line, markup=False, soft_wrap=True)

    def verdict(self) -> list[str]:
        """Whether all did the same work, in words."""
        if not self.results:
            return []
        base = self._reference.contestant.name
        worst: dict[str, tuple[float, str]] = {}
        for name, deviation in self.deviations.items():
            kind = self.results[name].contestant.precision
            worst[kind] = max(worst.get(kind, (0.0, base)), (deviation, name))
        text = ", ".join(f"{k} {d:.1e} ({name})" for k, (d, name) in worst.items())
        lines = [
            f"losses of the first {COMPARED} steps, largest relative deviation from "
            f"those of {base}: {text}"
        ]
        if self.disagreeing:
            limits = ", ".join(f"{kind} {limit:g}" for kind, limit in TOLERANCE.items())
            lines.append(
                f"FAILED: not the same work: {', '.join(self.disagreeing)}; allowed: "
                f"{limits}"
            )
        return lines

    @property
    def _reference(self) -> Result | None:
        """Whose losses the others must have."""
        exact = [r for r in self.results.values() if r.contestant.precision == "fp32"]
        rest = [*exact, *self.results.values()]
        return self.results.get(REFERENCE) or (rest[0] if rest else None)

    def _deviation(self, r: Result) -> float:
        """Largest relative difference of a loss; infinite where one is not a number."""
        pairs = zip(r.losses[:COMPARED], self._reference.losses[:COMPARED], strict=True)
        apart = [abs(own - other) / abs(other) for own, other in pairs]
        return max(math.inf if math.isnan(a) else a for a in apart)

    def _tolerance(self, r: Result) -> float:
        kinds = (r.contestant.precision, self._reference.contestant.precision)
        return max(TOLERANCE[kind] for kind in kinds)

    def _cells(self, r: Result) -> tuple[str, ...]:
        return (
            f"{r.median * 1e3:.1f}",
            f"{r.tokens / r.median:.0f}",
            _ratio(self.to_reference(r)),
            _ratio(self.to_best(r)),
            f"{r.peak / _MIB:.0f}",
            f"{r.memory['proportional'] / _MIB:.0f}",
            f"{r.losses[:COMPARED][-1]:.4f}",
        )

    def _entry(self, c: Contestant) -> dict[str, Any]:
        facts: dict[str, Any] = asdict(c)
        r = self.results.get(c.name)
        if r is None:
            return facts | {"not_run": self.reasons.get(c.name, "")}
        return facts | {
            "median_seconds": r.median,
            "tokens_per_second": r.tokens / r.median,
            "to_torch_eager": self.to_reference(r),
            "to_torch_best": self.to_best(r),
            "loss_deviation": finite(self.deviations[c.name]),
            "seconds": list(r.seconds),
            "losses": [finite(loss) for loss in r.losses],
            "memory_bytes": dict(r.memory),
            "facts": dict(r.facts),
        }


def _ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"
