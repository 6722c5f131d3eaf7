"""Counts of what every axis moved: calls, bytes, seconds and waiting seconds.

Bytes are those one rank sends under the bandwidth-optimal algorithm, as integers. With
N the bytes of the full array, cut in n blocks by ``shares`` (the first blocks are the
longer ones), N_i the bytes of block i and r the own rank:

    reduce_scatter    N - N_r                  ring; (n-1)/n N when n divides
    all_gather        N - N_(r+1)              ring; (n-1)/n N
    all_reduce        2N - N_r - N_(r+1)       both rings in turn; 2(n-1)/n N
    all_to_all        N_local - own block      (n-1)/n N_local
    broadcast         N on the root, 0 elsewhere
    send, send_recv   N, the bytes sent; recv counts 0, so a sum over ranks counts
                      every message once
    barrier           0

Pickled set-up calls (``*_obj``) are not counted.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

Table = dict[str, dict[str, dict[str, float]]]


@dataclass(slots=True)
class Tally:
    """What one operation on one axis cost this rank.

    seconds  time inside the calls, with copies and packing
    wait     the part of it spent inside MPI until the operation was complete
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    wait: float = 0.0


class Counters:
    """One tally per (axis, operation) of one rank."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}

    def tally(self, axis: str, op: str) -> Tally:
        """Return the live tally of ``op`` on ``axis``, made when first asked for."""
        return self._tallies.setdefault((axis, op), Tally())

    def snapshot(self) -> dict[tuple[str, str], tuple]:
        """Return today's figures, to be given to ``since`` later."""
        return {key: astuple(tally) for key, tally in self._tallies.items()}

    def since(self, snapshot: Mapping[tuple[str, str], tuple] | None = None) -> Table:
        """Return {axis: {op: {calls, bytes, seconds, wait}}} since ``snapshot``.

        Without a snapshot: since the start. Operations that were not called are absent.
        """
        before = snapshot or {}
        table: Table = {}
        for (axis, op), now in self.snapshot().items():
            old = before.get((axis, op), (0, 0, 0.0, 0.0))
            fresh = [b - a for a, b in zip(old, now, strict=True)]
            if fresh[0]:
                names = ("calls", "bytes", "seconds", "wait")
                table.setdefault(axis, {})[op] = dict(zip(names, fresh, strict=True))
        return table


def shares(length: int, parts: int) -> list[int]:
    """Cut ``length`` in ``parts``: the first ``length % parts`` get one more."""
    each, rest = divmod(length, parts)
    return [each + (i < rest) for i in range(parts)]


def ring_scatter_bytes(blocks: list[int], rank: int) -> int:
    """Bytes ``rank`` sends in a ring reduce-scatter of blocks of these sizes."""
    return sum(blocks) - blocks[rank]


def ring_gather_bytes(blocks: list[int], rank: int) -> int:
    """Bytes ``rank`` sends in a ring all-gather of blocks of these sizes."""
    return sum(blocks) - blocks[(rank + 1) % len(blocks)]


def ring_reduce_bytes(items: int, itemsize: int, parts: int, rank: int) -> int:
    """Bytes ``rank`` sends in a ring all-reduce of ``items`` elements."""
    each, rest = divmod(items, parts)
    own, following = rank < rest, (rank + 1) % parts < rest
    return itemsize * (2 * (items - each) - own - following)
