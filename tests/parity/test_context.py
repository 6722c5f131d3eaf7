"""A sequence that several ranks share gives the serial loss, gradients and weights,
whatever the method, the mask and the other axes; and what the comparison notices."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import prod

import numpy as np
import pytest
from parity import test_continuous
from parity.build import (
    FP32,
    FP64,
    compare,
    count_valid,
    layout_engine,
    make_batch,
    make_recipe,
    own_batches,
    serial_engine,
    write_tokens,
)
from parity.test_resume import hops

from mpipar.comm import Communicator
from mpipar.config.kinds import METHODS
from mpipar.data import IGNORE, Batch
from mpipar.engine import Engine
from mpipar.engine.sequence import OwnSequence
from mpipar.layers.context import ring
from mpipar.layers.context.ulysses import UlyssesCore
from mpipar.layers.rope import Rope
from mpipar.verify import run_verification

# The tokens of a batch are below 11, so that most sequences have several documents.
END = "data.documents=separate data.end_token=3"
MASKS = {
    "causal": "",
    "documents": END,
    "window": "model.window=5",
    "both": f"model.window=9 {END}",
}
SIZES = "model.vocab=11 model.ffn=24 train.global_batch=8 train.clip=0.1"
CP2, TP2, PP2 = "parallel.context=2", "parallel.tensor=2", "parallel.pipeline=2"
AXES = ("context", "tensor", "pipeline")
# (ranks, words)
LAYOUTS = [
    (2, CP2),
    (3, "parallel.context=3 parallel.zero=1"),
    (4, "parallel.context=4"),
    (4, f"{CP2} {TP2}"),
    (4, f"{CP2} {TP2} parallel.sequence=true"),
    (4, f"{CP2} {PP2}"),
    (4, f"{CP2} {PP2} parallel.schedule=zb-h1 parallel.zero=1"),
    (4, f"{CP2} parallel.zero=3"),
]
WIDE = [
    (6, f"parallel.context=3 {TP2}"),
    (6, f"parallel.context=3 {PP2} parallel.zero=2"),
    (8, "parallel.context=8 parallel.zero=3"),
    (8, f"parallel.context=4 {TP2} parallel.sequence=true"),
    (8, f"parallel.context=4 {PP2} parallel.partition=measured"),
    (8, "parallel.context=4 parallel.zero=2"),
    (8, f"{CP2} {TP2} {PP2} parallel.schedule=zb-v"),
    (8, f"{CP2} parallel.zero=3 parallel.zero_shard=4 "
        'parallel.order=["cp","dp","tp","pp"]'),
]  # fmt: skip
# What else a case has: at place p of the layouts and m of the methods, it has value
# a·p + b·m + c·⌊p/2⌋ + d·⌊m/2⌋ + e·⌊p/4⌋, so that every pair of values occurs.
FACTORS = {
    "mask": (tuple(MASKS), (0, 1, 1, 0, 0)),
    "kv": (("all", "half", "one"), (1, 0, 0, 1, 0)),
    "family": (("gpt", "llama"), (0, 0, 1, 1, 0)),
    "tied": (("true", "false"), (0, 1, 0, 0, 1)),
    "dropout": ((0.0, 0.1), (1, 0, 0, 1, 0)),
    "recompute": (("none", "full"), (1, 1, 0, 0, 0)),
    "micro": ((1, 2), (0, 1, 1, 0, 1)),
    "length": (("even", "odd"), (0, 1, 1, 1, 0)),
}


def chosen(place: int, method: int, turn: int = 0) -> dict:
    """Values of all factors."""
    numbers = place, method, place // 2, method // 2, place // 4
    return {
        name: values[(turn + sum(map(int.__mul__, numbers, weights))) % len(values)]
        for name, (values, weights) in FACTORS.items()
    }


def changes(ranks: int, words: str, method: str, case: dict) -> list[str]:
    """A recipe; it has as many heads as every method can cut."""
    sizes = dict(word.split("=") for word in words.split())
    axes = [int(sizes.get(f"parallel.{axis}", 1)) for axis in AXES]
    cp, tp = axes[:2]
    heads = max(4, cp * tp * (1 + cp % 2))
    kv = {"all": heads, "half": heads // 2, "one": 1}[case["kv"]]
    # No multiple of what most methods need
    odd = 14 if "parallel.sequence" in sizes else 13
    more = "parallel.ulysses=2" if method == "usp" and cp >= 4 else ""
    return [
        *f"{SIZES} {words} {MASKS[case['mask']]} {more}".split(),
        f"parallel.context_method={method}",
        f"model.heads={heads}", f"model.kv_heads={kv}", f"model.width={4 * heads}",
        f"model.family={case['family']}", f"model.tied={case['tied']}",
        f"model.dropout={case['dropout']}", f"train.recompute={case['recompute']}",
        f"model.context={24 if case['length'] == 'even' else odd}",
        f"train.micro_batch={8 * prod(axes) // ranks // case['micro']}",
    ]  # fmt: skip


def cases(layouts: list, *marks: pytest.MarkDecorator) -> Iterator:
    """Every layout with every method, and their places."""
    for place, (ranks, words) in enumerate(layouts):
        for number, method in enumerate(METHODS):
            every = [pytest.mark.mpi(ranks, timeout=240), *marks]
            name = f"{method} {words}".replace("parallel.", "")
            given = ranks, words, method, place, number
            yield pytest.param(*given, marks=every, id=name)


NAMES = ("ranks", "words", "method", "place", "number")


@pytest.mark.parametrize(NAMES, list(cases(LAYOUTS)))
def test_a_shared_sequence_gives_what_one_rank_computes(
    comm, ranks, words, method, place, number
):
    case = chosen(place, number)
    recipe = make_recipe(ranks, *changes(ranks, words, method, case))
    assert compare(recipe, comm, steps=2).above(FP64) == {}


@pytest.mark.parametrize(NAMES, list(cases(WIDE, pytest.mark.full)))
def test_more_of_everything_agrees(comm, ranks, words, method, place, number):
    """Two masks of each method, the other two of the next one."""
    for turn, mask in enumerate(list(MASKS)[number % 2 :: 2], 1):
        case = chosen(place, number, turn) | {"mask": mask}
        recipe = make_recipe(ranks, *changes(ranks, words, method, case))
        assert compare(recipe, comm, steps=2).above(FP64) == {}, case


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.mpi(4)
def test_it_agrees_in_fp32(comm, method):
    case = chosen(0, 0) | {"mask": "both", "family": "llama", "kv": "half"}
    words = [*changes(4, "parallel.context=4", method, case), "train.precision=fp32"]
    assert compare(make_recipe(4, *words), comm).above(FP32) == {}


def test_the_standard_tier_covers_every_pair():
    rows = [
        (place, number, *chosen(place, number).values())
        for place, number in product(range(len(LAYOUTS)), range(len(METHODS)))
    ]
    sizes = [len(set(column)) for column in zip(*rows, strict=True)]
    assert sizes == [8, 6, *(len(values) for values, _ in FACTORS.values())]
    for a, b in combinations(range(len(sizes)), 2):
        assert len({(row[a], row[b]) for row in rows}) == sizes[a] * sizes[b]


@pytest.mark.parametrize("words", ["", "parallel.zero=2 model.context=13"])
@pytest.mark.mpi(4)
def test_training_without_a_break_agrees(comm, words):
    changes = f"{CP2} {PP2} train.micro_batch=6 {words}"
    test_continuous.test_it_is_the_serial_loop_with_a_delay(comm, 4, changes)


@pytest.mark.parametrize("method", ["striped", "usp"])
@pytest.mark.mpi(2)
def test_verify_agrees(comm, tmp_path, method):
    words = f"{CP2} parallel.context_method={method} model.context=15 {MASKS['both']}"
    source = f"data.source={write_tokens(comm, tmp_path)}"
    recipe = make_recipe(2, source, *words.split())
    assert run_verification(recipe, comm, steps=2) is True


# Evaluation, and what it says about the masks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("words", [CP2, f"{CP2} {TP2} parallel.sequence=true"])
@pytest.mark.mpi(4)
def test_evaluation_agrees(comm, method, words):
    """Also where tokens are added, and where documents are told apart."""
    for number, mask in enumerate(MASKS):
        length = "odd" if mask in ("documents", "window") else "even"
        case = chosen(0, number) | {"mask": mask, "length": length, "micro": 2}
        recipe = make_recipe(4, *changes(4, words, method, case))
        batch = make_batch(recipe, 0)
        valid = count_valid(batch)
        exact = serial_engine(recipe).evaluate([batch], valid)
        with layout_engine(recipe, comm) as engine:
            found = engine.evaluate(own_batches(engine, batch), valid)
        assert found == pytest.approx(exact, rel=1e-12), case


def loss_of(engine: Engine, tokens: np.ndarray, labels: np.ndarray) -> float:
    """The sum over all labels that count."""
    return engine.evaluate([Batch(tokens, labels, np.arange(len(tokens)))], 1)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.mpi(2)
def test_a_packed_document_is_as_if_alone(comm, method, family):
    words = f"{SIZES} {CP2} parallel.context_method={method} model.family={family}"
    words += " model.context=24"
    recipe = make_recipe(2, *words.split(), *END.split())
    rng = np.random.default_rng(8)
    tokens = rng.choice([0, 1, 2, 4, 5], (1, 24))
    labels = rng.integers(0, 11, (1, 24))
    begins = [0, 1, 10, 11, 18, 24]
    tokens[0, np.array(begins[1:-1]) - 1] = 3
    apart = 0.0
    alone = serial_engine(make_recipe(2, *words.split()))
    for lo, hi in pairwise(begins):
        apart += loss_of(alone, tokens[:, lo:hi], labels[:, lo:hi])
    with layout_engine(recipe, comm) as engine:
        assert loss_of(engine, tokens, labels) == pytest.approx(apart, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.mpi(2)
def test_a_window_hides_what_is_further_back(comm, method):
    """Two blocks with a window of 3: a token is felt up to 4 places on."""
    words = f"{SIZES} {CP2} parallel.context_method={method} model.window=3"
    recipe = make_recipe(2, *words.split(), "model.context=24")
    tokens = np.zeros((1, 24), np.int64)
    with layout_engine(recipe, comm) as engine:
        for place in (0, 5, 11, 19):
            felt = []
            for first in (place + 4, place + 5):
                labels = np.full((1, 24), IGNORE)
                labels[:, first:] = 1
                other = tokens.copy()
                other[0, place] = 2
                losses = {loss_of(engine, x, labels) for x in (tokens, other)}
                felt.append(len(losses) > 1)
            assert felt == [True, False], place


# Controls: what the comparison must notice


def drop_a_hop(patch):
    """Gradients of keys and values that the second hop makes are lost."""
    whole = ring._Homeward.send

    def send(self, own):
        if self.hop == 1:
            own[...] = 0.0
        whole(self, own)

    patch.setattr(ring._Homeward, "send", send)


def keep_gradients(patch):
    """Gradients of gathered keys and values stay summands of this rank."""

    def own(self, x):
        return np.split(x, self.size)[self.rank]

    patch.setattr(Communicator, "reduce_scatter", own)


def turn_keys_locally(patch):
    """Keys are turned by their places on this rank; there must be one head of them."""
    rotate = Rope.rotate

    def turn(self, x, positions, *, inverse=False):
        if x.shape[2] == 1:
            positions = np.arange(len(positions))
        rotate(self, x, positions, inverse=inverse)

    patch.setattr(Rope, "rotate", turn)


def shift_labels_locally(patch):
    """The label of a token is that before the next token here; the last has none."""
    whole = OwnSequence.labels

    def labels(self, batch):
        moved = np.pad(batch.labels, ((0, 0), (1, 0)))[:, :-1]
        found = whole(self, Batch(batch.tokens, moved, batch.samples))
        return np.pad(found[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)

    patch.setattr(OwnSequence, "labels", labels)


def mask_locally(patch):
    """Queries and keys are compared by their places on their ranks."""
    whole = ring.spans_of

    def spans_of(step, heads, queries, keys):
        return whole(step, heads, np.arange(len(queries)), np.arange(len(keys)))

    patch.setattr(ring, "spans_of", spans_of)


def tell_documents_locally(patch):
    """A document seems to begin with each part of the sequence."""
    whole = OwnSequence.firsts

    def firsts(self, batch):
        start = np.arange(self.length) // len(self.own) * len(self.own)
        return np.maximum(whole(self, batch), start)

    patch.setattr(OwnSequence, "firsts", firsts)


def drop_heads_alike(patch):
    """All ranks that exchange heads draw the masks of the first ones."""
    patch.setattr(UlyssesCore, "_of_own_heads", lambda self, dropout, own: dropout)


K = "gradients blocks.1.attention.k.weight"
V = "gradients blocks.0.attention.v.weight"
# fault, methods, more of the recipe, and among others what must differ
PLANTED = [
    (drop_a_hop, ("ring", "zigzag", "striped"), "", K),
    (keep_gradients, ("allgather",), "", V),
    (turn_keys_locally, METHODS, "model.family=llama model.kv_heads=1", "loss"),
    (shift_labels_locally, METHODS, "", "loss"),
    (mask_locally, ("ring", "zigzag", "striped"), "", V),
    (tell_documents_locally, METHODS, END, "loss"),
    (drop_heads_alike, ("ulysses", "usp"), "model.dropout=0.1", "loss"),
]


@pytest.mark.parametrize(
    ("fault", "method", "words", "what"),
    [
        pytest.param(fault, method, *more, id=f"{fault.__name__} {method}")
        for fault, methods, *more in PLANTED
        for method in methods
    ],
)
@pytest.mark.mpi(2)
def test_a_planted_fault_is_found(comm, monkeypatch, fault, method, words, what):
    changes = f"{SIZES} {CP2} parallel.context_method={method} {words}"
    recipe = make_recipe(2, *changes.split())
    assert compare(recipe, comm, steps=1).above(FP64) == {}
    fault(monkeypatch)
    found = compare(recipe, comm, steps=1).above(1e-4)
    assert what in found
    if fault in (drop_a_hop, keep_gradients):
        # The forward pass is right.
        assert "loss" not in found


# Checkpoints

TWO = [
    (2, f"{CP2} parallel.context_method=zigzag train.micro_batch=6"),
    (2, f"{TP2} train.micro_batch=8"),
    (2, f"{CP2} parallel.context_method=ulysses parallel.zero=3 train.micro_batch=12"),
    (1, "train.micro_batch=24"),
]


@pytest.mark.parametrize(
    ("model", "numbers"),
    [
        ("gpt", [0, 1]),
        ("llama", [1, 0]),
        pytest.param("llama", [0, 1, 2, 3], marks=pytest.mark.full),
        pytest.param("untied", [2, 0, 1], marks=pytest.mark.full),
    ],
)
@pytest.mark.mpi(2)
def test_a_run_goes_on_with_another_cut_of_the_sequence(comm, tmp_path, model, numbers):
    assert hops(comm, tmp_path, model, TWO, numbers) == {}
