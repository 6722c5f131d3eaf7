"""Draws how a schedule runs, in letters."""

from fractions import Fraction
from math import gcd, lcm

from mpipar.pipeline.schedules import Schedule
from mpipar.pipeline.simulate import Simulation

# Times are drawn exactly where they are multiples of 1 / _FINEST.
_FINEST = 1000


def chart(schedule: Schedule, simulation: Simulation, width: int = 100) -> str:
    """One line for each stage: its actions over time, '.' where it is idle.

    width   most characters of a line. A slot is as long as the greatest time of which
            all times are multiples, and -- continues an action in its next slots. Where
            these do not fit, time is scaled to the width at most, and an action without
            room for its name is its first letter and dashes.
    """
    names = [f"s{stage}" for stage in range(schedule.stages)]
    margin = len(names[-1]) + 1
    texts = [[a.text(schedule.chunks) for a in row] for row in schedule.actions]
    slot = 1 + max(len(text) for row in texts for text in row)
    shortest = _shortest(simulation)
    enough = round(simulation.makespan / shortest * slot) if shortest else 1
    unit = _unit(simulation)
    if unit and simulation.makespan / unit * slot + margin <= width + 1:
        rows = _slots(texts, simulation, unit, slot)
    else:
        rows = _scaled(texts, simulation, max(min(width - margin, enough), 1))
    lines = [f"{name:<{margin}}{row}" for name, row in zip(names, rows, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


def _shortest(simulation: Simulation) -> float:
    """Time of the shortest action that takes time."""
    pairs = zip(simulation.starts, simulation.ends, strict=True)
    times = (e - b for rows in pairs for b, e in zip(*rows, strict=True))
    return min((time for time in times if time > 0), default=0)


def _unit(simulation: Simulation) -> Fraction | None:
    """Greatest time of which every start and end is a multiple."""
    times = {
        t for rows in (simulation.starts, simulation.ends) for r in rows for t in r
    }
    exact = [Fraction(time).limit_denominator(_FINEST) for time in times]
    if any(abs(a - b) > 1e-6 for a, b in zip(exact, times, strict=True)):
        return None
    scale = lcm(*(time.denominator for time in exact))
    return Fraction(gcd(*(int(time * scale) for time in exact)), scale) or None


def _slots(
    texts: list[list[str]], simulation: Simulation, unit: Fraction, slot: int
) -> list[str]:
    rows = []
    for row, starts, ends in zip(
        texts, simulation.starts, simulation.ends, strict=True
    ):
        cells = ["."] * round(simulation.makespan / unit)
        for text, start, end in zip(row, starts, ends, strict=True):
            first, last = round(start / unit), round(end / unit)
            cells[first:last] = ([text] + ["--"] * (last - first))[: last - first]
        rows.append("".join(f"{cell:<{slot}}" for cell in cells))
    return rows


def _scaled(texts: list[list[str]], simulation: Simulation, width: int) -> list[str]:
    scale = width / simulation.makespan if simulation.makespan else 0
    rows = []
    for row, starts, ends in zip(
        texts, simulation.starts, simulation.ends, strict=True
    ):
        line = ["."] * width
        for text, start, end in zip(row, starts, ends, strict=True):
            first, last = round(start * scale), round(end * scale)
            room = last - first
            name = text if len(text) < room else text[0]
            line[first:last] = name.ljust(room, "-")[:room]
        rows.append("".join(line))
    return rows
