"""What the doctor measures and says of messages between ranks and nodes."""

import pytest
from rich.console import Console

from mpipar.cli.links import Link, judge_links, measure, table
from mpipar.cli.patience import Patience


def link(a, b, latency_s=2e-5, bandwidth=1e9, clock_s=0.0):
    return Link(a, b, latency_s, bandwidth, clock_s)


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ("aaaa", ["aa"]),
        ("aabb", ["aa", "ab"]),
        ("abab", ["aa", "ab"]),
        ("abca", ["aa", "ab", "ac", "bc"]),
        ("abcd", ["ab", "ac", "ad", "bc", "bd", "cd"]),
    ],
)
@pytest.mark.mpi(4)
def test_each_pair_of_nodes_is_measured_once(comm, hosts, pairs):
    with Patience(comm, hosts[comm.rank], 600) as patience:
        links = measure(comm, hosts[comm.rank], patience)
    assert [found.a + found.b for found in links] == pairs
    assert all(0 < found.latency_s < 1 for found in links)
    assert all(1e5 < found.bandwidth < 1e12 for found in links)
    assert all(abs(found.clock_s) < 1 for found in links)


@pytest.mark.mpi(1)
def test_one_rank_has_no_links(comm):
    with Patience(comm, "a", 600) as patience:
        assert measure(comm, "a", patience) == [] == judge_links([])


def test_usual_links_are_told_as_ranges():
    links = [link("a", "a", 1e-6, 5e9), link("a", "b"), link("a", "c", 3e-5)]
    messages, clocks = judge_links(links)
    assert (messages.state, clocks.state) == ("ok", "ok")
    assert messages.text == (
        "inside a node 1 µs, 5 GB/s; between nodes 20 to 30 µs, 1 GB/s"
    )
    assert [found["b"] for found in messages.details] == ["a", "b", "c"]


@pytest.mark.parametrize("worse", [{"latency_s": 1e-3}, {"bandwidth": 1e8}])
def test_a_slow_pair_is_named(worse):
    links = [link("a", "b"), link("a", "c"), link("b", "c", **worse)]
    messages, _ = judge_links(links)
    assert messages.state == "warn" and "b to c" in messages.text and messages.advice


@pytest.mark.parametrize(("ahead", "behind"), [(5.0, "a"), (-5.0, "b")])
def test_a_clock_that_is_off_is_named(ahead, behind):
    *_, clocks = judge_links([link("a", "b", clock_s=ahead)])
    assert clocks.state == "warn"
    assert f"that of {behind} is behind" in clocks.text


def test_few_nodes_have_a_table_of_pairs(capsys):
    links = [link("a", "a"), link("a", "b"), link("a", "c", 3e-5), link("b", "c")]
    Console(width=80).print(table(links))
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["µs,", "GB/s", "b", "c"],
        ["a", "20,", "1", "30,", "1"],
        ["b", "20,", "1"],
    ]


def test_one_node_and_many_have_none():
    assert table([]) is None and table([link("a", "a")]) is None
    assert table([link("a", name) for name in "bcdefghi"]) is None
