"""Schedules list every action once and in an order that can run; text reads back."""

import re
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.config.schedules import NEEDS
from mpipar.errors import ConfigError
from mpipar.pipeline.schedule_text import format_schedule, parse_schedule
from mpipar.pipeline.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    forward_only,
    make_schedule,
    requirements,
    single_stage,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of a few stages."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    needs, p = NEEDS[name], draw(st.integers(1, 6))
    m = draw(st.integers(max(1, needs.per_stage * p), 16))
    least, most = needs.chunks
    return make_schedule(name, p, m, draw(st.integers(least, most or 4)))


def words(schedule: Schedule, stage: int) -> str:
    return " ".join(a.text(schedule.chunks) for a in schedule.actions[stage])


def refused(text: str) -> list[str]:
    """What is wrong with a text that must be refused."""
    with pytest.raises(ConfigError) as caught:
        parse_schedule(text, "mine.txt")
    assert caught.value.exit_code == 2
    assert caught.value.title == "the schedule mine.txt"
    return caught.value.violations


def test_actions_of_one_stage():
    assert single_stage(2) == [
        ("F", 0, 0),
        ("BW", 0, 0),
        ("F", 1, 0),
        ("BW", 1, 0),
    ]
    assert forward_only(2) == [("F", 0, 0), ("F", 1, 0)]
    assert [str(Action("F", 0)), str(Action("BW", 3, 1))] == ["F0", "BW3.1"]
    assert Action("F", 0).text(chunks=2) == "F0.0"


@pytest.mark.parametrize(
    ("name", "chunks", "rows"),
    [
        ("naive", 1, ["F0 BW0 F1 BW1 F2 BW2"] * 2),
        ("gpipe", 1, ["F0 F1 F2 BW0 BW1 BW2"] * 2),
        ("1f1b", 1, ["F0 F1 BW0 F2 BW1 BW2", "F0 BW0 F1 BW1 F2 BW2"]),
        ("1f1b-eager", 1, ["F0 F1 F2 BW0 BW1 BW2", "F0 BW0 F1 BW1 F2 BW2"]),
        ("zb-h1", 1, ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
        ("zb-h2", 1, ["F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 B0 F1 B1 F2 B2 W0 W1 W2"]),
    ],
)
def test_three_micro_batches_on_two_stages(name: str, chunks: int, rows: list[str]):
    schedule = make_schedule(name, 2, 3, chunks)
    assert [words(schedule, stage) for stage in range(2)] == rows


def test_two_chunks_on_two_stages():
    assert words(make_schedule("interleaved", 2, 2, 2), 1) == (
        "F0.0 F1.0 F0.1 BW0.1 F1.1 BW1.1 BW0.0 BW1.0"
    )
    assert words(make_schedule("zb-v", 2, 3), 1) == (
        "F0.0 F0.1 F1.0 F1.1 B0.1 W0.1 F2.0 B0.0 W0.0 F2.1 B1.1 W1.1 "
        "B1.0 B2.1 B2.0 W1.0 W2.1 W2.0"
    )
    assert words(make_schedule("dualpipe-v", 2, 4), 0) == (
        "F0.0 F1.0 F2.0 F0.1 B0.1 W0.1 F1.1 F3.0 BW1.1 F2.1 BW0.0 BW2.1 F3.1 BW1.0 "
        "BW3.1 B2.0 W2.0 B3.0 W3.0"
    )


@given(schedules())
def test_every_action_comes_once_and_weights_in_rising_order(schedule: Schedule):
    pieces = {
        (i, c) for i in range(schedule.micro_batches) for c in range(schedule.chunks)
    }
    for row in schedule.actions:
        done = defaultdict(list)
        for kind, i, chunk in row:
            for part in ("B", "W") if kind == "BW" else (kind,):
                done[part].append((i, chunk))
        assert sorted(done) == ["B", "F", "W"]
        assert all(sorted(found) == sorted(pieces) for found in done.values())
        # One rank adds weight gradients in this order: the same sums to the last bit.
        for chunk in range(schedule.chunks):
            numbers = [i for i, c in done["W"] if c == chunk]
            assert numbers == sorted(numbers)


@given(schedules())
def test_virtual_stages_have_one_owner(schedule: Schedule):
    for virtual in range(schedule.virtual_stages):
        assert schedule.virtual(*schedule.owner(virtual)) == virtual
    owners = [schedule.owner(u) for u in range(schedule.virtual_stages)]
    assert len(set(owners)) == schedule.stages * schedule.chunks


def test_placements():
    loop, vee = make_schedule("interleaved", 3, 3, 2), make_schedule("zb-v", 3, 5)
    assert [loop.owner(u)[0] for u in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [vee.owner(u)[0] for u in range(6)] == [0, 1, 2, 2, 1, 0]


def test_batches_without_a_break_are_one_long_1f1b():
    long = make_schedule("2bw", 3, 4, batches=5)
    assert long.micro_batches == 20
    assert long.actions == make_schedule("1f1b", 3, 20).actions


def test_chunks_default_to_the_fewest():
    assert [make_schedule(name, 2, 4).chunks for name in SCHEDULES] == [
        1, 1, 1, 1, 2, 1, 1, 2, 1, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "reasons"),
    [
        (("interleaved", 4, 5, 1), ["chunks = 1 must be 2 or more .*; try 2"]),
        (("zb-v", 4, 1, 3), ["chunks = 3 must be 2 for zb-v; try 2"]),
        (("gpipe", 4, 1, 2), ["chunks = 2 must be 1 for gpipe; try 1"]),
        (
            ("dualpipe-v", 4, 7, 1),
            ["chunks = 1 ", "= 7 must be at least 8 .*try .* = 8 or stages = 3"],
        ),
        (("dualpipe-v", 4, 1), ["must be at least 8 .*; try micro_batches = 8$"]),
        (("2bw", 4, 3), ["micro_batches = 3 must be at least 4 .*= 4 or stages = 3"]),
        (("1f1b", 4, 3, 1, 2), ["batches = 2 must be 1 .*; try batches = 1 or 2bw"]),
        (("1f1b", 0, -1), ["stages = 0 .*; try 1", "micro_batches = -1 .*; try 1"]),
        (("zb-v", 2, 3, -1), ["chunks = -1 must be 2"]),
        (("1f1", 2, 0), ["1f1 is none of .* naive, .*; try 1f1b", "micro_batches"]),
    ],
)
def test_sizes_are_refused_with_all_reasons(sizes: tuple, reasons: list[str]):
    with pytest.raises(ConfigError) as caught:
        make_schedule(*sizes)
    found = caught.value.violations
    assert found == requirements(*sizes) and len(found) == len(reasons)
    for violation, reason in zip(found, reasons, strict=True):
        assert re.search(reason, violation), violation


@given(schedules())
@settings(max_examples=60)
def test_text_reads_back(schedule: Schedule):
    assert parse_schedule(format_schedule(schedule), schedule.name) == schedule


def test_text_may_have_commas_comments_and_empty_cells():
    text = "# mine\n\nF0, ,F1,BW0,BW1  # stage 0\n,F0 ,B0, F1,B1\tW0 W1\n"
    schedule = parse_schedule(text, "mine.txt")
    assert words(schedule, 1) == "F0 B0 F1 B1 W0 W1"
    assert (schedule.placement, schedule.chunks) == ("loop", 1)


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("", ["it has no actions"]),
        ("# only words\n", ["it has no actions"]),
        ("F0 BW0 X1", ["line 1: X1 is no action; write F, B, W or BW"]),
        ("F0 BW0 F1.x", ["line 1: F1.x is no action"]),
        ("F0 F0 BW0", ["line 1: F0 does F a second time"]),
        ("F0 BW0 W0", ["line 1: W0 does W a second time"]),
        ("F0 B0 BW0", ["line 1: BW0 does B a second time"]),
        ("F0 BW0 BW0", ["BW0 does B a second", "BW0 does W a second"]),
        ("F0 B0", ["line 1 lacks W0"]),
        ("F0 BW0\nF0", ["line 2 lacks BW0; each stage does F and BW"]),
        ("F0 F1 BW0 BW1\nF0 BW0", ["line 2 lacks F1, BW1"]),
        ("F0 W0", ["line 1 lacks B0"]),
        ("F0 W0 B0", ["line 1: W0 comes before its B"]),
        ("BW0 F0", ["line 1: BW0 comes before its F"]),
        ("F1 BW1", ["no stage does micro-batch 0, but there is a micro-batch 1"]),
        ("F0.1 BW0.1", ["no stage does chunk 0"]),
        ("# placement: ring\nF0 BW0", ["line 1: placement ring must be loop or vee"]),
        ("# placement: vee\nF0 BW0", ["placement vee needs 2 chunks"]),
        ("F0 F0 Y\nBW0", ["Y is no", "F0 does F a", "1 lacks BW0", "2 lacks F0"]),
        (
            "F0 F1 BW0 BW1\nF1 F0 BW0 BW1",
            ["stage 0 sends activations of micro-batches 0 1, but stage 1 .* 1 0"],
        ),
        (
            "F0 BW0 F1 BW1\nF0 F1 BW0 BW1",
            [
                "stage 0 waits for ever: its BW0 comes before BW0 of stage 1",
                "stage 1 waits for ever: its F1 comes before F1 of stage 0",
            ],
        ),
    ],
)
def test_texts_are_refused_with_all_reasons(text: str, reasons: list[str]):
    found = refused(text)
    assert len(found) == len(reasons), found
    for violation, reason in zip(found, reasons, strict=True):
        assert re.search(reason, violation), violation


def test_long_lists_of_missing_actions_are_cut():
    full = " ".join(f"F{i} BW{i}" for i in range(10))
    assert "BW3 and 8 more;" in refused(f"{full}\n#\n# x\n\n \nF9 BW9 F8 BW8")[0]


@given(st.text(alphabet="FBW0123.,# \n-placement:v", max_size=60))
@settings(max_examples=200)
def test_any_text_is_read_or_refused(text: str):
    try:
        schedule = parse_schedule(text, "mine.txt")
    except ConfigError:
        return
    assert parse_schedule(format_schedule(schedule), "mine.txt") == schedule
