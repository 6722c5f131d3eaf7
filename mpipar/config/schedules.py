"""What each pipeline schedule needs of the recipe."""

from typing import NamedTuple


class Needs(NamedTuple):
    """Limits of one schedule.

    chunks      fewest and most pieces of the model on a stage (None: any number)
    per_stage   fewest micro-batches for each stage; 0: one is enough for all
    """

    chunks: tuple[int, int | None] = (1, 1)
    per_stage: int = 0


NEEDS = {
    "naive": Needs(),
    "gpipe": Needs(),
    "1f1b": Needs(),
    "1f1b-eager": Needs(),
    "interleaved": Needs(chunks=(2, None)),
    "zb-h1": Needs(),
    "zb-h2": Needs(),
    "zb-v": Needs(chunks=(2, 2)),
    "2bw": Needs(per_stage=1),
    "dualpipe-v": Needs(chunks=(2, 2), per_stage=2),
}


def is_file(schedule: str) -> bool:
    """True where a schedule is given as the path of a text file."""
    return any(mark in schedule for mark in "./\\")
