"""Schedules: pure functions that list, for each stage, what it does in which order.

p  stages, s  one of them, m  micro-batches, v  chunks of the model on each stage. A
generator is called with (p, s, m, v) and lists the actions of stage s; `SCHEDULES` names
them all. To add one, write such a function and enter it there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpipar.errors import ConfigError

KINDS = ("F", "B", "W", "BW")
PLACEMENTS = ("loop", "vee")


class Action(NamedTuple):
    """One entry of a schedule, on one micro-batch and one chunk of the stage.

    kind   F forward, B gradient of the input, W gradient of the weights, BW both
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return self.text(chunks=1 + self.chunk)

    def text(self, chunks: int) -> str:
        """BW3, or BW3.0 where the stage has several chunks."""
        return f"{self.kind}{self.micro_batch}" + f".{self.chunk}" * (chunks > 1)


@dataclass(frozen=True)
class Schedule:
    """What every stage does in which order.

    placement       loop: stage s owns the virtual stages s, s + p, s + 2p, ...
                    vee: stage s owns the virtual stages s and 2p - 1 - s
    actions         one row of actions for each stage
    micro_batches   0 .. micro_batches - 1, each seen by every chunk of every stage
    chunks          pieces of the model on each stage
    """

    name: str
    placement: str
    actions: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        return len(self.actions)

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    def virtual(self, stage: int, chunk: int) -> int:
        """Place of a chunk on the way of a micro-batch through the model."""
        if self.placement == "vee" and chunk == 1:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def owner(self, virtual: int) -> tuple[int, int]:
        """Stage and chunk of a virtual stage: the inverse of `virtual`."""
        chunk, stage = divmod(virtual, self.stages)
        if self.placement == "vee" and chunk == 1:
            stage = self.stages - 1 - stage
        return stage, chunk


def single_stage(micro_batches: int) -> list[Action]:
    """F0 BW0 F1 BW1 …: a model that is not cut keeps one micro-batch in flight."""
    return [
        Action(kind, number) for number in range(micro_batches) for kind in ("F", "BW")
    ]


def forward_only(micro_batches: int) -> list[Action]:
    """F0 F1 …: evaluation."""
    return [Action("F", number) for number in range(micro_batches)]


def naive(p: int, s: int, m: int, v: int) -> list[Action]:
    """One micro-batch at a time: a single stage works, the others wait."""
    return single_stage(m)


def gpipe(p: int, s: int, m: int, v: int) -> list[Action]:
    """All forward, then all backward (Huang et al. 2019). Holds m micro-batches.

    Backward in rising order: it ends at the same time as the falling order of the paper,
    and gradients are summed in the order of one rank, so they keep the same bits.
    """
    return forward_only(m) + [Action("BW", i) for i in range(m)]


def one_f_one_b(p: int, s: int, m: int, v: int) -> list[Action]:
    """A forward for each backward (Narayanan et al. 2019, 2021). Holds min(p - s, m)."""
    return _in_turns(*_all(m), warm_up=p - 1 - s)


def eager_one_f_one_b(p: int, s: int, m: int, v: int) -> list[Action]:
    """1F1B that starts early enough to hide the way of messages. Holds 2(p - s) - 1."""
    return _in_turns(*_all(m), warm_up=2 * (p - 1 - s))


def interleaved(p: int, s: int, m: int, v: int) -> list[Action]:
    """1F1B over v chunks a stage (Narayanan et al. 2021): 1/v of the bubble.

    Micro-batches go through chunk after chunk in groups of p.
    """
    groups = [range(i, min(i + p, m)) for i in range(0, m, p)]
    forwards, backwards = (
        [Action(kind, i, chunk) for group in groups for chunk in order for i in group]
        for kind, order in (("F", range(v)), ("BW", range(v - 1, -1, -1)))
    )
    return _in_turns(forwards, backwards, warm_up=2 * (p - 1 - s) + (v - 1) * p)
