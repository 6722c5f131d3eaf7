"""Sequences cut over ranks by every method, and what the ranks of one hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from mpipar.comm.null import NullCommunicator
from mpipar.config import Recipe
from mpipar.config.context_rules import heads_fit
from mpipar.config.kinds import METHODS
from mpipar.data import Batch
from mpipar.engine.sequence import OwnSequence
from mpipar.layers.base import Step, nbytes
from mpipar.layers.context import Core, Heads, LocalCore
from mpipar.ops import Ops, make_ops

END = 1  # the id that ends a document
LENGTH = 96  # whole parts for all of `every_cut`
DOCUMENTS = ((10, 21, 17, 48), (1, 5, 89, 1))


def cut_recipe(
    method: str, context: int, *, heads: int = 4, kv_heads: int = 0, **fields: Any
) -> Recipe:
    """A recipe with sequences cut by a method. fields: "section.name" as
    section_name, such as data_documents."""
    model = {"layers": 1, "width": 8 * heads, "heads": heads, "context": context}
    tables = {"model": model | {"kv_heads": kv_heads or heads, "vocab": 256}}
    tables |= {"parallel": {"context_method": method}, "data": {"end_token": END}}
    for key, value in fields.items():
        section, _, name = key.partition("_")
        tables[section][name] = value
    return Recipe.model_validate(tables)


class StandIn:
    """A grid with a context axis only, seen from one rank, on which nothing moves."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.cp = _axis("cp", ranks, rank)

    def sub(self, axis: str, ranks: int) -> NullCommunicator:
        """As `Grid.sub`."""
        return _axis(f"{axis}/{ranks}", ranks, self.cp.rank % ranks)

    def across(self, axis: str, ranks: int) -> NullCommunicator:
        """As `Grid.across`."""
        return _axis(f"{axis}:{ranks}", self.cp.size // ranks, self.cp.rank // ranks)


def _axis(name: str, size: int, rank: int) -> NullCommunicator:
    made = NullCommunicator(name)
    made.size, made.rank = size, rank
    return made


def own_sequence(recipe: Recipe, ranks: int, rank: int) -> OwnSequence:
    """What one of the ranks that share a sequence holds."""
    return OwnSequence(recipe, StandIn(ranks, rank), make_ops("cpu", "fp64"))


def all_sequences(method: str, ranks: int, context: int, **fields: Any) -> list:
    """What each of the ranks holds."""
    recipe = cut_recipe(method, context, **fields)
    return [own_sequence(recipe, ranks, rank) for rank in range(ranks)]


def batch_of(tokens: Any) -> Batch:
    """A micro-batch of these ids; labels are the next ones, the last has none."""
    tokens = np.atleast_2d(np.asarray(tokens))
    labels = np.roll(tokens, -1, axis=1)
    labels[:, -1] = -100
    return Batch(tokens, labels, np.arange(len(tokens)))


def firsts_of(documents: Iterable[Sequence[int]]) -> np.ndarray:
    """First position of each token's document, by the lengths of each sequence's."""
    rows = [np.repeat(np.cumsum([0, *sizes[:-1]]), sizes) for sizes in documents]
    return np.array(rows, np.int64)


# --- cores ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Attention over a whole sequence, the same on every rank.

    documents   lengths of each sequence's; empty = one
    drops       whether probabilities are dropped out
    real        positions whose outputs count; 0 = all
    """

    length: int
    queries: int = 4
    keys: int = 4
    width: int = 4
    batch: int = 2
    window: int = 0
    documents: tuple = ()
    drops: bool = False
    precision: str = "fp64"
    real: int = 0

    @property
    def heads(self) -> Heads:
        return Heads(self.queries, self.keys, self.width, 0.6, self.window)

    @property
    def firsts(self) -> np.ndarray | None:
        return firsts_of(self.documents) if self.documents else None

    def arrays(self) -> list[np.ndarray]:
        """q, k, v and the gradient of o; a longer sequence begins the same."""
        heads = self.queries, self.keys, self.keys, self.queries
        found = []
        for seed, n in enumerate(heads):
            rng, shape = np.random.default_rng(seed), (self.length, self.batch, n)
            x = rng.standard_normal((*shape, self.width)).astype(self.ops().dtype)
            found.append(np.ascontiguousarray(x.swapaxes(0, 1)))
        if self.real:
            found[-1][:, self.real :] = 0.0
        return found

    def step(self, positions: np.ndarray) -> Step:
        samples = np.arange(self.batch)
        return Step(positions=positions, samples=samples, firsts=self.firsts)

    def dropout(self) -> Any:
        """Factors by global head and positions, from one array for all."""
        if not self.drops:
            return lambda queries, keys, first: None
        shape = self.batch, self.queries, self.length, self.length
        factors = (np.random.default_rng(4).random(shape) > 0.3) / 0.7
        factors = factors.astype(self.ops().dtype)

        def tiles(queries: np.ndarray, keys: np.ndarray, first: int) -> Any:
            def tile(bs: slice, heads: slice, rows: slice, cols: slice) -> np.ndarray:
                own = factors[bs, first + heads.start : first + heads.stop]
                return own[:, :, queries[rows]][..., keys[cols]]

            return tile

        return tiles

    def ops(self) -> Ops:
        return make_ops("cpu", self.precision)


@dataclass
class Attended:
    """What a core made of a problem's positions; `held` are the bytes it saved."""

    o: np.ndarray
    grads: tuple[np.ndarray, np.ndarray, np.ndarray]
    held: int = 0


def attend(
    problem: Problem, core: Core, places: np.ndarray, between: Any = None
) -> Attended:
    """Forward and backward of the positions `places`; `between` is called there."""
    q, k, v, do = (np.ascontiguousarray(x[:, places]) for x in problem.arrays())
    shared = problem.step(places), problem.heads, problem.dropout()
    o, saved = core.forward(q, k, v, *shared)
    if between is not None:
        between()
    grads = tuple(np.zeros_like(x) for x in (q, k, v))
    inputs = None if core.keeps_inputs else (q, k, v)
    core.backward(do, inputs, o, saved, *shared, grads)
    return Attended(o, grads, nbytes(saved))


def every_cut(*sizes: int) -> list:
    """Parameters method, ranks, parallel.ulysses of tests on so many ranks; eight of
    them are for the wide sweep."""
    found = []
    for n in sizes or (2, 3, 4, 8):
        marks = [pytest.mark.mpi(n), *([pytest.mark.full] if n > 4 else [])]
        for method in METHODS:
            found.append(pytest.param(method, n, 0, marks=marks, id=f"{method} on {n}"))
        if n % 4 == 0:
            name = f"usp 2 x {n // 2}"
            found.append(pytest.param("usp", n, 2, marks=marks, id=name))
    return found


def sequence_of(
    problem: Problem, method: str, grid: Any, asked: int = 0
) -> OwnSequence | None:
    """How this rank holds the sequence; None where it cannot exchange these heads."""
    if method == "ulysses" and not heads_fit(
        grid.cp.size, problem.queries, problem.keys
    ):
        return None
    recipe = cut_recipe(
        method,
        problem.length,
        heads=problem.queries,
        kv_heads=problem.keys,
        parallel_ulysses=asked,
    )
    return OwnSequence(recipe, grid, problem.ops())


@cache
def alone(problem: Problem) -> Attended:
    """The same on one rank."""
    core = LocalCore(problem.ops())
    return attend(problem, core, np.arange(problem.length))
