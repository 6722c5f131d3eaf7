"""Cuts the blocks of a model into parts, one for each virtual stage of a pipeline."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from mpipar.errors import ConfigError


def even(blocks: int, parts: int) -> list[int]:
    """Number of blocks in each part, differing by one at most.

    The parts just before the last get one more: the last one has the head to do as
    well, and the first ones hold the activations of more micro-batches.
    """
    if parts < 1 or blocks < 0:
        raise ConfigError([f"{blocks} blocks cannot be cut into {parts} parts"], _TITLE)
    return shared_out(blocks, range(parts))


def shared_out(
    blocks: int,
    owners: Sequence[int],
    *,
    time: float = 1.0,
    first: float = 0.0,
    last: float = 0.0,
) -> list[int]:
    """Number of blocks in each part such that their owners have equally much to do.

    A stage that owns several parts has the work of all. Block after block goes to the
    owner with the least, there to the part with the fewest; where that is the same, not
    to the last part, and to later ones first.

    owners   of each part;  time  of a block;  first, last  as in `balanced`
    """
    counts, load = [0] * len(owners), dict.fromkeys(owners, 0.0)
    load[owners[0]] += first
    load[owners[-1]] += last
    for _ in range(blocks):
        part = min(
            range(len(owners)),
            key=lambda i: (load[owners[i]], counts[i], i == len(owners) - 1, -i),
        )
        counts[part] += 1
        load[owners[part]] += time
    return counts


def balanced(
    times: Sequence[float],
    parts: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    memory: Sequence[float] | None = None,
    limit: float | None = None,
) -> list[int]:
    """Number of blocks in each part such that the slowest part is as fast as can be.

    Of those the one with the smallest sum of squared times: as even as can be. Exact,
    by dynamic programming; a part may be empty.

    times    of each block
    first    what the first part does besides: the embedding
    last     what the last part does besides: the head
    memory   of each block; no part may hold more than `limit`

    Raises ConfigError, with the smallest limit that works, where none fits.
    """
    if wrong := _check(times, parts, memory, limit):
        raise ConfigError(wrong, _TITLE)
    work, held = _Sums(times, parts, first, last), _Sums(memory or (), parts)

    def fits(part: int, begin: int, end: int) -> bool:
        return limit is None or held.of(part, begin, end) <= limit

    def slowest(before: float, part: int, begin: int, end: int) -> float:
        return max(before, work.of(part, begin, end)) if fits(part, begin, end) else inf

    best, counts = _search(len(times), parts, slowest)
    if best == inf:
        raise ConfigError([_too_large(held, len(times), parts, limit)], _TITLE)

    def uneven(before: float, part: int, begin: int, end: int) -> float:
        time = work.of(part, begin, end)
        return before + time**2 if time <= best and fits(part, begin, end) else inf

    _, counts = _search(len(times), parts, uneven)
    return counts


_TITLE = "the partition"


class _Sums:
    """Sums over the blocks begin .. end - 1 of a part, with what it does besides."""

    def __init__(
        self, each: Sequence[float], parts: int, first: float = 0, last: float = 0
    ) -> None:
        self._upto = list(accumulate(each, initial=0))
        self._extra: list[float] = [0] * parts
        self._extra[0] += first
        self._extra[-1] += last

    def of(self, part: int, begin: int, end: int) -> float:
        return self._upto[end] - self._upto[begin] + self._extra[part]


def _search(
    blocks: int, parts: int, cost: Callable[[float, int, int, int], float]
) -> tuple[float, list[int]]:
    """Least cost of a cut, and its number of blocks in each part.

    cost   of parts 0 .. part, from that of the parts before and from the blocks
           begin .. end - 1 of this one; inf where these may not be
    """
    before, choices = [0.0] + [inf] * blocks, []
    for part in range(parts):
        options = [
            min((cost(before[b], part, b, end), b) for b in range(end + 1))
            for end in range(blocks + 1)
        ]
        before = [value for value, _ in options]
        choices.append([begin for _, begin in options])
    counts, end = [], blocks
    for chosen in reversed(choices):
        counts.append(end - chosen[end])
        end = chosen[end]
    return before[-1], counts[::-1]


def _check(
    times: Sequence[float],
    parts: int,
    memory: Sequence[float] | None,
    limit: float | None,
) -> list[str]:
    wrong = []
    if parts < 1:
        wrong.append(f"{len(times)} blocks cannot be cut into {parts} parts; try 1")
    if (memory is None) != (limit is None):
        wrong.append("memory and limit are given together or not at all")
    if memory is not None and len(memory) != len(times):
        wrong.append(f"{len(times)} blocks have {len(memory)} sizes of memory")
    return wrong


def _too_large(held: _Sums, blocks: int, parts: int, limit: float) -> str:
    def largest(before: float, part: int, begin: int, end: int) -> float:
        return max(before, held.of(part, begin, end))

    least, _ = _search(blocks, parts, largest)
    return (
        f"limit = {limit} of memory is too little for {blocks} blocks in {parts} "
        f"parts; try {least} or more"
    )
