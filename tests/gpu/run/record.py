"""What a part of the run finds: a line of JSON each, written as soon as it is known."""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The rate of products is measured by one that takes the emulator a minute.
QUICK = """
import sys
from mpipar.cli import main
from mpipar.ops import Ops
Ops.matmul_rate = lambda self: 1e9
sys.exit(main())
"""


class SkippedError(Exception):
    """What a check needs is not there; the message says what."""


@dataclass(frozen=True)
class Setting:
    """What a part is told.

    dry      tiny sizes, for a machine without a GPU
    until    time.monotonic() after which nothing new is begun
    scratch  a folder that goes with the run
    comm     communicator of the ranks of a part that runs under mpiexec, else None
    """

    dry: bool
    until: float
    scratch: Path
    comm: Any = None

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.until - time.monotonic()

    @property
    def command(self) -> list[str]:
        """What starts mpipar."""
        return [sys.executable, *self.choose(["-m", "mpipar"], ["-c", QUICK])]

    def choose(self, real: Any, tiny: Any) -> Any:
        """The size for a GPU, or that for a dry run."""
        return tiny if self.dry else real


class Records:
    """The file of one part. What an earlier process of the part began is left out: it
    ended that process, or it is done.

    silent   this process writes failures alone: another rank writes the rest
    give_up  called after an exception: other ranks would wait for this one
    """

    def __init__(
        self,
        file: Path,
        part: str,
        *,
        silent: bool = False,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.file, self.part, self.silent = file, part, silent
        self.give_up = give_up
        self.seen = {x["name"] for x in read(file) if x["part"] == part}

    def check(
        self, name: str, act: Callable[[], float | None], limit: float | None = None
    ) -> bool:
        """Whether act() raised nothing, and gave at most `limit`; False if left out."""
        if name in self.seen:
            return False
        self._write("begin", name)
        began, line = time.monotonic(), {"limit": limit, "passed": True}
        try:
            value = act()
            line["value"] = None if value is None else float(value)
            line["passed"] = limit is None or bool(value <= limit)
            if not line["passed"]:
                line["error"] = f"{value:.3g} is more than {limit:.3g}"
        except SkippedError as reason:
            line = {"passed": None, "error": str(reason)}
        except Exception as error:
            line |= {"passed": False, "error": describe(error)}
            self._append("check", name, line)
            self.give_up()
            return False
        self._write("check", name, line | {"seconds": time.monotonic() - began})
        return line["passed"] is True

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        target: float | None = None,
        **facts: Any,
    ) -> None:
        """A measurement, and what it should reach."""
        line = {"value": value, "unit": unit, "target": target}
        line["reached"] = None if target is None else bool(value >= target)
        self._write("figure", name, line | facts)

    def fact(self, name: str, ask: Callable[[], Any]) -> None:
        """What this machine says of itself; what it cannot say is told."""
        try:
            value = ask()
        except Exception as error:
            value = f"unknown: {describe(error)}"
        self._write("fact", name, {"value": value})

    def _write(self, kind: str, name: str, line: dict[str, Any] | None = None) -> None:
        if not self.silent:
            self._append(kind, name, line or {})

    def _append(self, kind: str, name: str, line: dict[str, Any]) -> None:
        append(self.file, {"part": self.part, "kind": kind, "name": name} | line)


def append(file: Path, line: dict[str, Any]) -> None:
    """One line more; whole, whatever happens to this process afterwards."""
    text = json.dumps(_strict(line), default=str) + "\n"
    with file.open("a", encoding="utf-8") as records:
        records.write(text)
        records.flush()
        os.fsync(records.fileno())


def read(file: Path) -> list[dict[str, Any]]:
    """All lines so far."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def describe(error: BaseException) -> str:
    """An exception and where it was raised, in one short line."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]} ({places})"


def _strict(line: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN."""
    return {
        key: None if isinstance(x, float) and not math.isfinite(x) else x
        for key, x in line.items()
    }
