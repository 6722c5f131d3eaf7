"""Contestants in one process, each in its turn, round after round."""

from collections.abc import Callable, Mapping


def in_turns(
    calls: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Seconds that each contestant tells of every round but the first, by name."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, seconds in calls.items():
            spent = seconds()
            if number:
                found[name].append(spent)
    return found
