"""Partitions are even or the best there are, against all cuts tried one by one."""

import re
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import ConfigError
from mpipar.pipeline.partition import balanced, even, shared_out


def cuts(blocks: int, parts: int) -> list[list[int]]:
    """Every way to cut a row of blocks."""
    return [
        [b - a for a, b in pairwise((0, *inner, blocks))]
        for inner in combinations_with_replacement(range(blocks + 1), parts - 1)
    ]


def sums(counts: list[int], values: list[int]) -> list[int]:
    left = list(values)
    return [sum(left.pop(0) for _ in range(count)) for count in counts]


@given(st.integers(0, 60), st.integers(1, 16))
def test_even_parts_differ_by_one(blocks: int, parts: int):
    counts = even(blocks, parts)
    assert len(counts) == parts and sum(counts) == blocks and min(counts) >= 0
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_the_parts_before_the_last_get_more():
    assert even(10, 4) == [2, 3, 3, 2]
    assert even(8, 4) == [2, 2, 2, 2]
    assert even(3, 4) == [1, 1, 1, 0]
    with pytest.raises(ConfigError, match="8 blocks cannot be cut into 0 parts"):
        even(8, 0)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_other_cut_is_better(data: st.DataObject):
    sizes = st.integers(0, 9)
    times = data.draw(st.lists(sizes, max_size=7))
    parts, first, last = data.draw(st.tuples(st.integers(1, 4), sizes, sizes))
    memory = data.draw(st.lists(sizes, min_size=len(times), max_size=len(times)))
    limit = data.draw(st.none() | st.integers(0, 30))

    def cost(counts: list[int]) -> tuple[int, int]:
        work = sums(counts, times)
        work[0] += first
        work[-1] += last
        return max(work), sum(time**2 for time in work)

    options = cuts(len(times), parts)
    heaviest = {tuple(c): max(sums(c, memory)) for c in options}
    fitting = [c for c in options if limit is None or heaviest[tuple(c)] <= limit]
    bound = {} if limit is None else {"memory": memory, "limit": limit}
    if fitting:
        counts = balanced(times, parts, first=first, last=last, **bound)
        assert counts in fitting and cost(counts) == min(map(cost, fitting))
    else:
        with pytest.raises(ConfigError, match=f"try {min(heaviest.values())} or more"):
            balanced(times, parts, first=first, last=last, **bound)


def test_the_smallest_limit_that_is_named_works():
    times, memory = [1.0, 2.0, 1.5, 0.5], [0.1, 0.2, 0.3, 0.7]
    with pytest.raises(ConfigError) as caught:
        balanced(times, 2, memory=memory, limit=0.4)
    limit = float(re.search(r"try (\S+) or more", str(caught.value))[1])
    assert limit == pytest.approx(0.7)
    assert balanced(times, 2, memory=memory, limit=limit) == [3, 1]


def test_wrong_arguments_are_named_together():
    with pytest.raises(ConfigError) as caught:
        balanced([1.0], 0, memory=[1.0, 2.0])
    assert len(caught.value.violations) == 3


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 4))
def test_stages_with_several_parts_have_equally_much(blocks, stages, chunks):
    for schedule in ("interleaved", "zb-v"):
        owners = [n % stages for n in range(stages * chunks)]
        if schedule == "zb-v":
            owners = [*range(stages), *reversed(range(stages))]
        counts = shared_out(blocks, owners)
        assert sum(counts) == blocks and max(counts) - min(counts) <= 1
        loads = [0] * stages
        for count, owner in zip(counts, owners, strict=True):
            loads[owner] += count
        assert max(loads) - min(loads) <= 1


def test_the_work_of_the_ends_counts():
    # Stage 0 has the first and the last part, with work of two blocks in the head.
    assert shared_out(6, [0, 1, 1, 0], last=2.0) == [1, 2, 2, 1]
    assert shared_out(8, [0, 1, 0, 1], last=4.0) == [3, 1, 3, 1]
