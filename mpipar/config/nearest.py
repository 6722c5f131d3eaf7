"""Nearest legal values, and how they are listed in a message."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isqrt

from mpipar.config.write import shown


def divisors(n: int) -> list[int]:
    """All divisors of n >= 1, rising."""
    low = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return sorted({*low, *(n // k for k in low)})


def around(value: int, step: int) -> list[int]:
    """The positive multiples of `step` next below and next above `value`."""
    below = (value - 1) // step * step
    above = (value // step + 1) * step
    return [below, above] if below > 0 else [above]


def neighbours(value: int, choices: Collection[int]) -> list[int]:
    """The choices next below and next above `value`."""
    below = [k for k in choices if k < value]
    above = [k for k in choices if k > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def either(values: Iterable[object]) -> str:
    """'2', '2 or 4', '2, 4 or 8'."""
    *first, last = [shown(value) for value in values]
    return f"{', '.join(first)} or {last}" if first else last


def advice(options: Mapping[str, Sequence[object]]) -> str:
    """The end of a message: what to set instead, by dotted key.

    One key gives '; try 2 or 4', since the message began with it; several give
    '; try model.ffn = 64 or 66, or parallel.tensor = 1'. Nothing to offer gives ''.
    """
    if len(options) == 1:
        offers = [either(values) for values in options.values() if values]
    else:
        offers = [f"{key} = {either(vals)}" for key, vals in options.items() if vals]
    return f"; try {', or '.join(offers)}" if offers else ""
