"""Simulated schedules take, hold and send what the formulas of the papers say."""

from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.config.schedules import NEEDS
from mpipar.errors import ConfigError
from mpipar.pipeline.chart import chart
from mpipar.pipeline.schedules import SCHEDULES, Action, Schedule, make_schedule
from mpipar.pipeline.simulate import (
    Costs,
    Simulation,
    check_schedule,
    costs_of,
    messages,
    proves_no_deadlock,
    simulate,
)

UNIT = Costs(Fraction(1), Fraction(1), Fraction(1))
SIZES = [(1, 1), (2, 3), (3, 2), (4, 8), (5, 11)]
ORDER = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]
ALL_COSTS = list(product(range(1, 6), repeat=3))


def run(
    name: str, p: int, m: int, v: int = 0, costs: Costs = UNIT, **more
) -> Simulation:
    return simulate(make_schedule(name, p, m, v), costs, **more)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs, int]:
    """Any schedule of a few stages, costs of every virtual stage, a latency."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    needs, p = NEEDS[name], draw(st.integers(1, 6))
    m = draw(st.integers(max(1, needs.per_stage * p), 16))
    least, most = needs.chunks
    schedule = make_schedule(name, p, m, draw(st.integers(least, most or 4)))
    n = schedule.virtual_stages
    times = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    costs = Costs(*draw(st.tuples(times, times, times)))
    return schedule, costs, draw(st.integers(0, 3))


# The pairs F BW of DualPipeV run one after the other here and not as one action, so
# that the next stage has the result of F earlier: it ends as early as ZB-V.
@pytest.mark.parametrize(
    ("p", "m", "makespans"),
    [
        (4, 8, [33, 33, 28.5, 26.25, 27, 27, 25.5, 25.5]),
        (4, 12, [45, 45, 40.5, 38.25, 39, 39, 37.5, 37.5]),
        (8, 24, [93, 93, 82.5, 77.25, 79, 79, 75.5, 75.5]),
    ],
)
def test_makespans_at_unit_costs(p: int, m: int, makespans: list[float]):
    found = [run(name, p, m, v) for name, v in ORDER]
    assert [simulation.makespan for simulation in found] == makespans
    assert {simulation.ideal for simulation in found} == {3 * m}


def test_two_different_numbers_are_called_bubble():
    found = run("1f1b", 4, 8)
    assert (found.bubble, found.bubble_ratio) == (Fraction(3, 11), Fraction(3, 8))
    assert found.idle == (9, 9, 9, 9)
    assert found.span_idle == (9, 6, 3, 0)
    assert run("1f1b", 3, 2, costs=Costs(0, 0, 0)).bubble == 0


def test_zb_h2_has_no_bubble_inside_a_stage():
    assert run("zb-h2", 4, 8).span_idle == (0, 0, 0, 0)
    assert run("zb-h1", 4, 8).span_idle == (3, 2, 1, 0)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_makespans_at_all_costs(p: int, m: int):
    for f, b, w in ALL_COSTS:
        ideal, d, costs = m * (f + b + w), b + w, Costs(f, b, w)
        found = {n: run(n, p, m, costs=costs) for n in ("naive", "gpipe", "1f1b")}
        assert found["naive"].makespan == m * p * (f + d)
        assert found["gpipe"].makespan == ideal + (p - 1) * (f + d)
        assert found["1f1b"].makespan == ideal + (p - 1) * (f + d)
        assert all(simulation.ideal == ideal for simulation in found.values())


# A pipeline must be filled: the formulas of zero bubble hold from these sizes on.
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 6), (4, 8), (5, 11)])
def test_zero_bubble_makespans_at_all_costs(p: int, m: int):
    for f, b, w in ALL_COSTS:
        ideal, costs = m * (f + b + w), Costs(f, b, w)
        h1 = ideal + (p - 1) * max(f, b, f + b - w)
        h2 = ideal + (p - 1) * max(f, b - f, f + b - 2 * w)
        assert run("zb-h1", p, m, costs=costs).makespan == h1
        assert run("zb-h2", p, m, costs=costs).makespan == h2


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_keeps_its_promise_for_any_number_of_micro_batches(p: int, v: int):
    for m in range(1, 3 * p + 3):
        found = run("interleaved", p, m, v)
        bubble = Fraction(3 * (p - 1), v)
        if m >= p:
            assert found.makespan == 3 * m + bubble
        group = -(-m // max(1, m // p))
        assert found.peak_in_flight == tuple(
            min(2 * (p - 1 - s) + (v - 1) * group + 1, m * v) / v for s in range(p)
        )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peaks_in_flight(p: int, m: int):
    def peaks(name: str) -> tuple[float, ...]:
        return run(name, p, m).peak_in_flight

    assert peaks("naive") == (1,) * p
    assert peaks("gpipe") == (m,) * p
    assert peaks("1f1b") == tuple(min(p - s, m) for s in range(p))
    assert peaks("1f1b-eager") == tuple(min(2 * (p - s) - 1, m) for s in range(p))
    assert peaks("zb-h1") == (min(p, m),) * p
    assert peaks("zb-h2") == (min(2 * p - 1, m),) * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_vees_of_enough_micro_batches(p: int):
    for m in range(2 * p - 1, 3 * p + 3):
        found = run("zb-v", p, m)
        assert found.makespan == 3 * m + Fraction(p - 1, 2)
        assert found.peak_in_flight == (p,) * p and set(found.span_idle) == {0}
    for m in range(2 * p, 3 * p + 3):
        found = run("dualpipe-v", p, m)
        assert found.makespan == 3 * m + Fraction(p - 1, 2)
        assert found.peak_in_flight == (p + 0.5,) * p


@pytest.mark.parametrize(("p", "m"), SIZES + [(8, 64)])
@pytest.mark.parametrize("latency", [Fraction(1, 4), Fraction(1, 8)])
def test_latency_shows_in_1f1b_and_is_hidden_by_an_early_start(
    p: int, m: int, latency: Fraction
):
    ideal, hops = 3 * (m + p - 1), p - 1
    seen = 2 * latency * (hops + (m - 1) * hops // p)
    assert run("1f1b", p, m, latency=latency).makespan == ideal + seen
    for name in ("gpipe", "1f1b-eager"):
        found = run(name, p, m, latency=latency).makespan
        assert found == ideal + 2 * latency * hops


def test_latency_of_the_long_example():
    assert run("1f1b", 8, 64, latency=0.25).makespan == 244
    assert run("1f1b-eager", 8, 64, latency=0.25).makespan == 216.5


def test_a_stage_hands_on_to_itself_in_no_time():
    assert run("zb-v", 1, 4, latency=5).makespan == 12
    assert run("interleaved", 1, 4, 3, latency=5).makespan == 12


@pytest.mark.parametrize(("p", "m", "n"), [(1, 1, 3), (3, 3, 4), (4, 8, 2)])
def test_batches_without_a_break_pay_once(p: int, m: int, n: int):
    found = simulate(make_schedule("2bw", p, m, batches=n), UNIT)
    assert (found.makespan, found.ideal) == (3 * m * n + 3 * (p - 1), 3 * m * n)


def test_gpipe_backward_in_falling_order_ends_at_the_same_time():
    rising = make_schedule("gpipe", 4, 6)
    rows = tuple(row[:6] + row[:5:-1] for row in rising.actions)
    falling = Schedule("falling", "loop", rows, 6)
    assert falling.actions[0][6] == Action("BW", 5)
    for f, b, w in ALL_COSTS:
        costs = Costs(f, b, w)
        assert simulate(falling, costs).makespan == simulate(rising, costs).makespan


@given(cases())
@settings(max_examples=150, deadline=None)
def test_all_that_is_needed_is_there_in_time(case: tuple[Schedule, Costs, int]):
    schedule, costs, latency = case
    found = simulate(schedule, costs, latency)
    times = costs.table(schedule)
    spans = {}
    for stage, row in enumerate(schedule.actions):
        bounds = list(zip(found.starts[stage], found.ends[stage], strict=True))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(bounds))
        for (kind, i, chunk), span in zip(row, bounds, strict=True):
            virtual = schedule.virtual(stage, chunk)
            assert span[1] - span[0] == times[kind][virtual]
            spans[kind[0], virtual, i] = span
    for (kind, u, i), (begin, _) in spans.items():
        needs = {"F": [("F", u - 1)], "B": [("F", u), ("B", u + 1)], "W": [("B", u)]}
        for part, other in needs[kind]:
            if 0 <= other < schedule.virtual_stages:
                far = schedule.owner(other)[0] != schedule.owner(u)[0]
                assert spans[part, other, i][1] + latency * far <= begin
    work = sum(sum(row) for row in (times["F"], times["BW"])) * schedule.micro_batches
    assert found.ideal <= found.makespan
    assert found.makespan <= work + 2 * latency * schedule.virtual_stages * (
        schedule.micro_batches
    )
    assert check_schedule(schedule) == []
    assert proves_no_deadlock(schedule, synchronous=False)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8)])
def test_sends_that_block_stop_all_but_the_simplest(p: int, m: int):
    runs = {
        name: proves_no_deadlock(make_schedule(name, p, m), synchronous=True)
        for name in SCHEDULES
    }
    assert {name for name, comes_to_its_end in runs.items() if comes_to_its_end} == {
        "naive",
        "gpipe",
    }
    assert proves_no_deadlock(make_schedule("1f1b", 1, m), synchronous=True)


def test_messages():
    assert messages(make_schedule("1f1b", 3, 5)) == [(5, 0), (5, 5), (0, 5)]
    assert messages(make_schedule("1f1b", 1, 5)) == [(0, 0)]
    assert messages(make_schedule("interleaved", 2, 4, 3)) == [(12, 8), (8, 12)]
    # The turn of the vee stays on the last stage.
    assert messages(make_schedule("zb-v", 3, 5)) == [(5, 5), (10, 10), (5, 5)]


@given(cases())
@settings(max_examples=50, deadline=None)
def test_messages_cross_every_boundary_once(case: tuple[Schedule, Costs, int]):
    schedule, m = case[0], case[0].micro_batches
    owners = [schedule.owner(u)[0] for u in range(schedule.virtual_stages)]
    crossings = sum(a != b for a, b in pairwise(owners))
    sent = messages(schedule)
    assert sum(s.activations for s in sent) == crossings * m
    assert sum(s.gradients for s in sent) == crossings * m


def test_who_waits_for_whom_is_said():
    rows = ("F0 F1 BW1 BW0", "F0 BW0 F1 BW1")
    actions = tuple(
        tuple(Action(w.rstrip("01"), int(w[-1])) for w in r.split()) for r in rows
    )
    with pytest.raises(ConfigError, match="sends gradients of micro-batches 0 1"):
        raise ConfigError(check_schedule(Schedule("x", "loop", actions, 2)))
    short = Schedule("x", "loop", (actions[0], actions[1][:3]), 2)
    with pytest.raises(ConfigError) as caught:
        simulate(short)
    assert caught.value.violations == [
        "stage 0 cannot do BW1: stage 1 never does B1",
    ]


def test_unfit_costs_are_refused_together():
    schedule = make_schedule("1f1b", 3, 4)
    with pytest.raises(ConfigError) as caught:
        simulate(schedule, Costs([1, 2], -1, float("inf")))
    assert len(caught.value.violations) == 3
    with pytest.raises(ConfigError, match="latency = -1 must be at least 0"):
        simulate(schedule, latency=-1)


def test_the_busiest_stage_is_the_ideal():
    found = run("1f1b", 3, 4, costs=Costs([1, 5, 1], [1, 1, 1], [2, 2, 2]))
    assert found.ideal == 4 * 8
    assert found.idle[1] == found.makespan - 32


def compact(text: str) -> list[list[str]]:
    """Cells of the lines of a chart."""
    return [line.split() for line in text.splitlines()]


def test_the_chart_of_1f1b():
    schedule = make_schedule("1f1b", 4, 8)
    assert chart(schedule, simulate(schedule), 200).splitlines()[3] == (
        "s3 .   .   .   F0  BW0 --  F1  BW1 --  F2  BW2 --  F3  BW3 --  F4  BW4 --  "
        "F5  BW5 --  F6  BW6 --  F7  BW7 --  .   .   .   .   .   ."
    )
    turns = "BW{0} -- F{1} ".format
    assert compact(chart(schedule, simulate(schedule), 200)) == [
        row.split()
        for row in (
            "s0 F0 F1 F2 F3 . . . . . . "
            + turns(0, 4) + turns(1, 5) + turns(2, 6) + turns(3, 7)
            + "BW4 -- . BW5 -- . BW6 -- . BW7 --",
            "s1 . F0 F1 F2 . . . . "
            + turns(0, 3) + turns(1, 4) + turns(2, 5) + turns(3, 6) + turns(4, 7)
            + "BW5 -- . BW6 -- . BW7 -- . .",
            "s2 . . F0 F1 . . "
            + turns(0, 2) + turns(1, 3) + turns(2, 4) + turns(3, 5) + turns(4, 6)
            + turns(5, 7) + "BW6 -- . BW7 -- . . . .",
            "s3 . . . F0 "
            + "".join(turns(i, i + 1) for i in range(7)) + "BW7 -- . . . . . .",
        )
    ]  # fmt: skip


def test_the_chart_of_zb_h1():
    schedule = make_schedule("zb-h1", 4, 8)
    lines = compact(chart(schedule, simulate(schedule), 100))
    assert " ".join(lines[0]) == (
        "s0 F0 F1 F2 F3 . . . B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 "
        "B7 W7"
    )
    assert " ".join(lines[3]) == (
        "s3 . . . F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 "
        "W6 W7"
    )


def test_charts_of_chunks_count_in_parts_of_a_stage():
    schedule = make_schedule("interleaved", 1, 1, 3)
    text = chart(schedule, simulate(schedule), 100)
    assert text == "s0 F0.0  F0.1  F0.2  BW0.2 --    BW0.1 --    BW0.0 --"


def test_charts_that_do_not_fit_are_scaled():
    schedule = make_schedule("1f1b", 2, 2)
    found = simulate(schedule, Costs(1, 1.3, 1.7), 0.001)
    assert chart(schedule, found, 40).splitlines() == [
        "s0 F0-F1-.........BW0-------...BW1------",
        "s1 ...F0-BW0------F1-BW1-------.........",
    ]
    # An action whose name would be cut is its first letter.
    assert chart(schedule, found, 13) == "s0 FF..B--.B-\ns1 .FB-FB-..."
    # No wider than it takes to name the shortest action.
    assert chart(schedule, found, 1000).splitlines() == [
        "s0 F0--F1--............BW0---------....BW1---------",
        "s1 ....F0--BW0---------F1--BW1---------............",
    ]


def test_charts_of_no_time():
    schedule = make_schedule("1f1b", 2, 2)
    assert chart(schedule, simulate(schedule, Costs(0, 0, 0)), 40) == "s0 .\ns1 ."


def test_large_pipelines_are_simulated():
    found = run("interleaved", 16, 256, 4, costs=Costs())
    assert found.makespan == 3 * 256 + 3 * 15 / 4


def test_times_of_actions_become_costs():
    schedule = make_schedule("dualpipe-v", 2, 6)
    spent = {"F": 1.0, "B": 2.0, "W": 3.0, "BW": 4.0}
    work = [
        {(kind, chunk): (5 * t, 5) for kind, t in spent.items() for chunk in (0, 1)}
        for _ in range(2)
    ]
    costs = costs_of(schedule, work)
    table = costs.table(schedule)
    assert table == {kind: [time] * 4 for kind, time in spent.items()}
    assert costs_of(schedule, [{}, {}]).table(schedule)["BW"] == [0.0] * 4
