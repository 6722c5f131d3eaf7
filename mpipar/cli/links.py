"""How fast messages are between nodes and inside of one, and how their clocks run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from mpipar.cli.finding import Finding

if TYPE_CHECKING:
    from mpi4py import MPI
    from rich.table import Table

    from mpipar.cli.patience import Patience

_SMALL, _LARGE = 8, 4 << 20
_ROUNDS, _LARGE_ROUNDS = 30, 3
# Pairs that are measured at most, one after the other
_MOST_PAIRS = 300
# Nodes of which a table is drawn
_FEW_NODES = range(2, 9)
_NO_NETWORK = (
    "Check the firewall between the nodes, and name the network: mpiexec -iface NAME "
    "(MPICH), mpiexec --mca btl_tcp_if_include NAME (Open MPI)."
)
# A clock may be off by so many seconds, a pair be so many times slower than most
_CLOCK_S, _SLOWER = 1.0, 3.0


@dataclass(frozen=True)
class Link:
    """Messages between two ranks: seconds one way, bytes per second, and by how many
    seconds the clock of b is ahead."""

    a: str
    b: str
    latency_s: float
    bandwidth: float
    clock_s: float


def measure(world: MPI.Comm, host: str, patience: Patience) -> list[Link]:
    """Pairs of nodes, and two ranks of one, each pair alone; on all ranks. Collective.

    host      of this rank
    patience  ends the job where messages of a pair do not arrive
    """
    names, found = world.allgather(host), []
    for a, b in _pairs(names):
        between = f"rank {a} on {names[a]} and rank {b} on {names[b]}"
        takes_part = world.rank in (a, b)
        patience.begin(f"messages between {between}", _NO_NETWORK, takes_part)
        world.Barrier()
        numbers = None
        if takes_part:
            numbers = _measure(world, b if world.rank == a else a, world.rank == a)
        found.append(Link(names[a], names[b], *world.bcast(numbers, a)))
    return found


def table(links: Sequence[Link]) -> Table | None:
    """Latency and bandwidth between each two nodes; None unless they are few."""
    from rich.table import Table

    between = {(link.a, link.b): link for link in links if link.a != link.b}
    names = list(dict.fromkeys(name for pair in between for name in pair))
    if len(names) not in _FEW_NODES:
        return None
    table = Table(box=None, pad_edge=False, header_style="")
    for head in ("µs, GB/s", *names[1:]):
        table.add_column(head)
    for name in names[:-1]:
        links_of_row = (between.get((name, other)) for other in names[1:])
        table.add_row(name, *(_cell(link) for link in links_of_row))
    return table


def _cell(link: Link | None) -> str:
    if link is None:
        return ""
    return f"{1e6 * link.latency_s:.3g}, {link.bandwidth / 1e9:.3g}"


def judge_links(links: Sequence[Link]) -> list[Finding]:
    """Judge what was measured; nothing where there is one rank."""
    if not links:
        return []
    inside = [link for link in links if link.a == link.b]
    between = [link for link in links if link.a != link.b]
    parts = []
    for name, some in (("inside a node", inside), ("between nodes", between)):
        if some:
            latencies = [1e6 * link.latency_s for link in some]
            rates = [link.bandwidth / 1e9 for link in some]
            parts.append(f"{name} {_range(latencies)} µs, {_range(rates)} GB/s")
    details = [asdict(link) for link in links]
    slow = list(_slow(between))
    finding = Finding("messages", "ok", "; ".join(parts), details=details)
    if slow:
        text = f"{finding.text}; much slower than others: {', '.join(slow)}"
        advice = "Check cables, switches and which network MPI uses on these nodes."
        finding = Finding("messages", "warn", text, advice, details)
    return [finding, *_clocks(between)]


def _pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Ranks that are measured: the first two of a node, and the first of each node
    with those of all others."""
    first: dict[str, int] = {}
    inside: list[tuple[int, int]] = []
    for rank, host in enumerate(hosts):
        if host in first and not inside:
            inside.append((first[host], rank))
        first.setdefault(host, rank)
    return [*inside, *combinations(first.values(), 2)][:_MOST_PAIRS]


def _measure(world: MPI.Comm, peer: int, leads: bool) -> tuple[float, float, float]:
    """Latency, bandwidth and clock difference; those of the one that leads count."""
    small, large = np.zeros(_SMALL, np.uint8), np.zeros(_LARGE, np.uint8)
    latency = min(_round_trips(world, peer, leads, small, _ROUNDS)) / 2
    seconds = min(_round_trips(world, peer, leads, large, _LARGE_ROUNDS)) / 2
    clock = np.zeros(1)
    if leads:
        began = time.time()
        world.Sendrecv(clock, peer, recvbuf=clock, source=peer)
        clock -= (began + time.time()) / 2
    else:
        world.Recv(np.zeros(1), peer)
        world.Send(np.array([time.time()]), peer)
    return latency, _LARGE / seconds, float(clock[0])


def _round_trips(
    world: MPI.Comm, peer: int, leads: bool, data: np.ndarray, rounds: int
) -> list[float]:
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        if leads:
            world.Send(data, peer)
            world.Recv(data, peer)
        else:
            world.Recv(data, peer)
            world.Send(data, peer)
        found.append(time.perf_counter() - began)
    return found


def _range(numbers: Sequence[float]) -> str:
    low, high = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return low if low == high else f"{low} to {high}"


def _slow(links: Sequence[Link]) -> Iterator[str]:
    if len(links) < 3:
        return
    usual = statistics.median(link.latency_s for link in links)
    rate = statistics.median(link.bandwidth for link in links)
    for link in links:
        if link.latency_s > _SLOWER * usual or link.bandwidth * _SLOWER < rate:
            yield f"{link.a} to {link.b}"


def _clocks(links: Sequence[Link]) -> list[Finding]:
    """One finding where there are several nodes."""
    if not links:
        return []
    worst = max(links, key=lambda link: abs(link.clock_s))
    text = f"of nodes differ by up to {abs(worst.clock_s):.3g} s"
    if abs(worst.clock_s) <= _CLOCK_S:
        return [Finding("clocks", "ok", text)]
    late, early = (worst.a, worst.b) if worst.clock_s > 0 else (worst.b, worst.a)
    text += f": that of {late} is behind that of {early}"
    return [Finding("clocks", "warn", text, "Let the nodes keep time (chrony, ntpd).")]
