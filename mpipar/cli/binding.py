"""Which cores each rank may use, and whether that is well chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpipar.cli.finding import Finding, count, of_ranks, some
from mpipar.cli.launch import Launch


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    cores     numbers of those that it may use
    node      how many the job may use on this node
    threads   that its largest BLAS runs
    """

    rank: int
    host: str
    cores: frozenset[int]
    node: int
    threads: int


def judge_binding(places: Sequence[Place], mpi: str, launch: Launch) -> Finding:
    """Judge the cores of all ranks; the worst that there is."""
    details = [_detail(place) for place in places]
    nodes: dict[str, list[Place]] = {}
    for place in places:
        nodes.setdefault(place.host, []).append(place)
    how = _how_to_bind(mpi, launch)
    crowds = list(_crowds(nodes))
    if crowds:
        advice = f"They wait for each other. Give each rank cores of its own: {how}."
        return Finding("binding", "bad", some(crowds), advice, details)
    cramped = [place for place in places if place.threads > len(place.cores)]
    if cramped:
        first = cramped[0]
        text = f"{count(first.threads, 'thread')} on {count(len(first.cores), 'core')}"
        text = f"{of_ranks([place.rank for place in cramped])}: {text}"
        advice = f"Unset OMP_NUM_THREADS and its like, or give more cores: {how}."
        return Finding("binding", "warn", text, advice, details)
    idle = list(_idle(nodes))
    if idle:
        advice = f"The others stay idle. Start more ranks, or give each more: {how}."
        return Finding("binding", "warn", some(idle), advice, details)
    return Finding("binding", "ok", _usual(nodes), details=details)


def _detail(place: Place) -> dict[str, Any]:
    return vars(place) | {"cores": sorted(place.cores)}


def _crowds(nodes: Mapping[str, Sequence[Place]]) -> Iterator[str]:
    """Nodes where ranks share cores although there are others."""
    for host, places in nodes.items():
        users = Counter(core for place in places for core in place.cores)
        if len(users) >= min(len(places), places[0].node):
            continue
        tight = [p for p in places if sum(1 / users[c] for c in p.cores) < 1 - 1e-9]
        cores = sorted({core for place in tight for core in place.cores})
        name = f"core{'s' if len(cores) != 1 else ''} {some(cores)}"
        ranks = of_ranks([place.rank for place in tight])
        yield f"{ranks} share {name} of {host}, which has {places[0].node}"


def _idle(nodes: Mapping[str, Sequence[Place]]) -> Iterator[str]:
    """Nodes with cores that no rank may use."""
    for host, places in nodes.items():
        used = len(frozenset().union(*(place.cores for place in places)))
        if used < places[0].node:
            yield f"ranks may use {used} of {places[0].node} cores of {host}"


def _usual(nodes: Mapping[str, Sequence[Place]]) -> str:
    places = [place for node in nodes.values() for place in node]
    if all(len(place.cores) == place.node for place in places):
        return "no rank is bound: each may use every core of its node"
    sizes = sorted({len(place.cores) for place in places})
    return f"each rank has {count(sizes[0], 'core')}" + (
        f" to {sizes[-1]}" if len(sizes) > 1 else ""
    )


def _how_to_bind(mpi: str, launch: Launch) -> str:
    """The launcher's own words, N being the cores of a rank."""
    if launch.name == "Slurm":
        return "srun --cpus-per-task=N --cpu-bind=cores"
    if "Open MPI" in mpi:
        return "mpiexec --map-by slot:pe=N, or --bind-to none"
    return "mpiexec -bind-to core:N, or without -bind-to"
