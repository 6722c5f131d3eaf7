"""Names ranks that are slower than those with the same work.

A straggler does not stop a run, it makes everybody wait. What tells it from the others
is its working time: the seconds of a step in which it did not wait for anybody.
"""

import socket
from collections import deque
from typing import Any

import numpy as np

# Ranks tell each other their working time every so many steps,
EVERY = 10
# and judge it when the busiest has worked for so long since the last time;
LEAST_S = 2.0
# a rank is named that was slow so many times in a row
ROWS = 3


class Stragglers:
    """Compares the working times of the ranks of each pipeline stage.

    Other stages have other work, and are not compared. Collective: all ranks make it,
    and call `note` after every step. Off where there is one rank.

    factor   how many times as long as the median of its stage (the lower one of two)
             makes a rank slow; up to 1 = off
    """

    def __init__(self, grid: Any, factor: float) -> None:
        self.world, self.factor = grid.world, factor
        self.is_on = factor > 1 and grid.world.size > 1
        self._own, self._steps = 0.0, 0
        self._sums = np.zeros(grid.world.size)
        self._windows: deque[tuple[int, np.ndarray]] = deque(maxlen=ROWS)
        self._named: set[int] = set()
        self.hosts, self.stages = [], np.zeros(0, int)
        if self.is_on:
            found = grid.world.all_gather_obj((socket.gethostname(), grid.pp.rank))
            self.hosts = [host for host, _ in found]
            self.stages = np.array([stage for _, stage in found])

    def note(self, seconds: float) -> list[dict[str, Any]]:
        """Takes the working time of this rank's last step; the slow ranks, the same on
        all ranks: rank, host, ratio, steps. Mostly none."""
        if not self.is_on:
            return []
        self._own += seconds
        self._steps += 1
        if self._steps % EVERY:
            return []
        self._sums += self.world.all_gather(np.array([self._own]))
        self._own = 0.0
        if self._sums.max() < LEAST_S:
            return []
        self._windows.append((self._steps, self._sums))
        self._steps, self._sums = 0, np.zeros(self.world.size)
        return self._slow()

    def news(self, slow: list[dict[str, Any]]) -> list[str]:
        """A line for each of the slow ranks that was not slow before."""
        fresh = [one for one in slow if one["rank"] not in self._named]
        if self._steps == 0:
            self._named = {one["rank"] for one in slow}
        return [
            f"warning: rank {one['rank']} on host {one['host']} is {one['ratio']:.1f} "
            f"times as slow as the median rank over the last {one['steps']} steps"
            for one in fresh
        ]

    def _slow(self) -> list[dict[str, Any]]:
        if len(self._windows) < ROWS:
            return []
        times = [seconds for _, seconds in self._windows]
        always = np.all([self._ratios(t) > self.factor for t in times], axis=0)
        steps, ratios = sum(n for n, _ in self._windows), self._ratios(sum(times))
        return [
            {
                "rank": int(rank),
                "host": self.hosts[rank],
                "ratio": float(ratios[rank]),
                "steps": steps,
            }
            for rank in np.flatnonzero(always)
        ]

    def _ratios(self, seconds: np.ndarray) -> np.ndarray:
        """Working times over the median of the own stage.   (ranks,) → (ranks,)"""
        ratios = np.ones_like(seconds)
        for stage in set(self.stages.tolist()):
            mine = self.stages == stage
            ordered = np.sort(seconds[mine])
            median = ordered[(len(ordered) - 1) // 2]
            ratios[mine] = seconds[mine] / max(median, 1e-9)
        return ratios
