"""Who is named as slow, judged from given working times."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpipar.train.stragglers import EVERY, ROWS, Stragglers


class World:
    """Ranks of which one is here; `times` are the working seconds of a step of all."""

    rank = 0

    def __init__(self, stages: list[int]) -> None:
        self.stages, self.size = stages, len(stages)
        self.times = np.ones(self.size)
        self.gathered = 0

    def all_gather_obj(self, own: tuple[str, int]) -> list[tuple[str, int]]:
        return [(f"host{rank}", stage) for rank, stage in enumerate(self.stages)]

    def all_gather(self, own: np.ndarray) -> np.ndarray:
        self.gathered += 1
        return own / self.times[0] * self.times


def make(stages: list[int], factor: float = 2.0) -> tuple[World, Stragglers]:
    world = World(stages)
    grid = SimpleNamespace(world=world, pp=SimpleNamespace(rank=stages[0]))
    return world, Stragglers(grid, factor)


def run(world: World, stragglers: Stragglers, steps: int, *times: float) -> list:
    """What is said in so many steps, (step, line), and the last that was found."""
    world.times = np.array(times)
    said = []
    for step in range(1, steps + 1):
        slow = stragglers.note(times[0])
        said += [(step, line, slow) for line in stragglers.news(slow)]
    return said


def test_a_slow_rank_is_named_after_some_intervals_and_once() -> None:
    world, stragglers = make([0, 0, 0, 0])
    ((step, line, found),) = run(world, stragglers, 100, 1, 1, 1, 2.4)
    assert step == EVERY * ROWS
    assert line == (
        "warning: rank 3 on host host3 is 2.4 times as slow as the median rank over "
        "the last 30 steps"
    )
    assert found == [
        {"rank": 3, "host": "host3", "ratio": pytest.approx(2.4), "steps": 30}
    ]
    # It is named anew when it had been as fast as the others
    assert run(world, stragglers, 30, 1, 1, 1, 1) == []
    assert len(run(world, stragglers, 30, 1, 1, 1, 3)) == 1


def test_of_two_ranks_the_slower_one_is_named() -> None:
    world, stragglers = make([0, 0])
    ((_, line, _),) = run(world, stragglers, 30, 3, 1)
    assert "rank 0 on host host0 is 3.0 times" in line


def test_stages_with_more_work_are_no_stragglers() -> None:
    world, stragglers = make([0, 1, 0, 1])
    assert run(world, stragglers, 60, 1, 5, 1, 5) == []
    ((_, line, _),) = run(world, stragglers, 60, 1, 5, 1, 15)
    assert "rank 3" in line and "3.0 times" in line


def test_a_rank_alone_on_its_stage_is_never_named() -> None:
    world, stragglers = make([0, 1, 2])
    assert run(world, stragglers, 60, 1, 9, 1) == []


def test_one_slow_interval_is_no_straggler() -> None:
    world, stragglers = make([0, 0, 0])
    for _ in range(3):
        assert run(world, stragglers, 20, 1, 1, 9) == []
        assert run(world, stragglers, 10, 1, 1, 1) == []


def test_short_steps_are_judged_over_seconds() -> None:
    """Milliseconds say nothing: the system may have been busy elsewhere."""
    world, stragglers = make([0, 0])
    assert run(world, stragglers, 500, 0.001, 0.005) == []
    assert world.gathered == 50
    (said,) = run(world, stragglers, 1500, 0.001, 0.005)
    assert said[2][0]["steps"] == 1200


@pytest.mark.parametrize(("stages", "factor"), [([0, 0], 0.0), ([0], 2.0)])
def test_off_means_no_messages(stages: list[int], factor: float) -> None:
    world, stragglers = make(stages, factor)
    assert run(world, stragglers, 60, *[1.0] * len(stages)) == []
    assert world.gathered == 0
