"""A worker's side of the comparison: makes steps when told to, and sleeps otherwise.

Orders and answers pass through two named pipes per rank, so that whoever waits is
blocked and takes no time from the one whose turn it is. This file needs the standard
library alone.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# The first step of a turn finds cold caches, as no step of a run does: only the second
# one is timed. The warm-up is as long, so that losses come in pairs.
WARM_UP, TIMED = 2, 1


class Turns:
    """The pipes of one rank, pinned to its cores; an exception is sent as an answer.

    folder   holds orders.RANK and answers.RANK, made by the other side
    cores    numbers of the cores, "0,1": a single process may use all of them, and of
             several each has the next one to itself
    """

    def __init__(self, folder: Path, rank: int, processes: int, cores: str) -> None:
        numbers = [int(number) for number in cores.split(",")]
        own = numbers if processes == 1 else [numbers[rank % len(numbers)]]
        os.sched_setaffinity(0, own)
        self._orders = (folder / f"orders.{rank}").open()
        self._answers = (folder / f"answers.{rank}").open("w")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            text = " ".join(str(error).split())
            self._answer({"failed": f"{kind.__name__}: {text}"[:300]})
        self._orders.close()
        self._answers.close()

    def serve(self, step: Callable[[], float], facts: dict[str, Any]) -> None:
        """Warm up, then make a pair of steps for every order until orders end.

        step    makes one training step and returns its loss
        facts   versions and the like, sent with the first answer
        """
        losses = [step() for _ in range(WARM_UP)]
        before = memory()
        forget_peak()
        self._answer({"facts": facts, "losses": losses, "memory": before})
        for order in self._orders:
            if order.strip() != "step":
                break
            losses = [step()]
            begin = time.perf_counter()
            losses.append(step())
            seconds = time.perf_counter() - begin
            self._answer({"seconds": seconds, "losses": losses, "memory": memory()})

    def _answer(self, facts: dict[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()


def memory() -> dict[str, int]:
    """Bytes of this process: peak resident, and resident with shared pages divided."""
    return {
        "peak": _field("/proc/self/status", "VmHWM:"),
        "proportional": _field("/proc/self/smaps_rollup", "Pss:"),
    }


def forget_peak() -> None:
    """Let the peak start again from what is resident now, where the kernel allows it.

    What imports, weights at their making and compilers took is then told apart from
    what steps take.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _field(file: str, name: str) -> int:
    """A line "name  number kB" of a file of /proc, in bytes; 0 where there is none."""
    return next((int(n) * 1024 for key, n in _lines(file) if key == name), 0)


def _lines(file: str) -> Iterator[tuple[str, str]]:
    try:
        text = Path(file).read_text()
    except OSError:
        return
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3:
            yield words[0], words[1]
