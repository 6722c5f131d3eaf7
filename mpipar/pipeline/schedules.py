"""Schedules: pure functions that list, for one stage, what it does in which order."""

from typing import NamedTuple


class Action(NamedTuple):
    """One entry of a schedule: F forward or BW backward of a micro-batch."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def single_stage(micro_batches: int) -> list[Action]:
    """F0 BW0 F1 BW1 …: a model that is not cut keeps one micro-batch in flight."""
    return [
        Action(kind, number) for number in range(micro_batches) for kind in ("F", "BW")
    ]


def forward_only(micro_batches: int) -> list[Action]:
    """F0 F1 …: evaluation."""
    return [Action("F", number) for number in range(micro_batches)]
