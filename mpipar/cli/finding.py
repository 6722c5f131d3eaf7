"""One line of the doctor, and words that all of its lines use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
_MOST_NAMES = 4


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: state is ok, warn or bad; details are for --json."""

    name: str
    state: str
    text: str
    advice: str = ""
    details: Sequence[Mapping[str, Any]] = ()


def count(number: int, noun: str) -> str:
    """A number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def some(names: Iterable[object]) -> str:
    """The first few of many names."""
    known = [str(name) for name in names]
    if len(known) <= _MOST_NAMES + 1:
        return ", ".join(known)
    return f"{', '.join(known[:_MOST_NAMES])} and {len(known) - _MOST_NAMES} more"


def of_ranks(ranks: Sequence[int]) -> str:
    """Some ranks by number: "rank 3", "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {some(ranks)}"


def by_node(values: Iterable[tuple[str, object]]) -> str:
    """Values of nodes in one text: the value where all agree, else who has which.

    values   node and value of each rank; "4.1 (a, b) / 4.2 (c)"
    """
    nodes: dict[str, dict[str, None]] = {}
    for node, value in values:
        nodes.setdefault(str(value), {})[node] = None
    if len(nodes) == 1:
        return next(iter(nodes))
    return " / ".join(f"{value} ({some(names)})" for value, names in nodes.items())
