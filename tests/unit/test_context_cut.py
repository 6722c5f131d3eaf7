"""Who holds which positions of a cut sequence, and how much work that is."""

from itertools import product

import numpy as np
import pytest
from context_cases import (
    END,
    all_sequences,
    batch_of,
    cut_recipe,
    firsts_of,
    own_sequence,
)
from hypothesis import given
from hypothesis import strategies as st

from mpipar.config.kinds import METHODS
from mpipar.data import IGNORE
from mpipar.errors import ShapeError
from mpipar.layers.base import Step
from mpipar.layers.context import LAYOUTS, Cut, Heads, held_positions
from mpipar.layers.context.core import LocalCore, spans_of
from mpipar.layers.context.gathered import GatheredCore
from mpipar.layers.context.ring import RingCore
from mpipar.layers.context.ulysses import UlyssesCore
from mpipar.ops.spans import pairs, spans_between

FAMILIES = pytest.mark.parametrize("family", ["gpt", "llama"])
# Method, ranks, neighbours that exchange heads
CUTS = [
    *(
        (m, n, 1)
        for m in ("ring", "zigzag", "striped", "allgather")
        for n in (1, 2, 3, 8)
    ),
    *(("ulysses", n, n) for n in (1, 2, 4)),
    *(("usp", n, u) for n, u in ((2, 1), (2, 2), (4, 2), (8, 2), (8, 4), (6, 3))),
]
cuts = pytest.mark.parametrize("method, n, u", CUTS)


# --- who holds what -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "u", "held"),
    [
        ("ring", 1, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("zigzag", 1, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("striped", 1, [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        ("allgather", 1, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11],
                          [6, 7, 8, 9]]),
        ("ulysses", 4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("usp", 2, [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ("usp", 4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
    ],
)  # fmt: skip
def test_four_ranks_share_sixteen_positions(method, u, held):
    cut = Cut(method, 4, u)
    assert [cut.of_rank(16, rank).tolist() for rank in range(4)] == held


@cuts
def test_every_position_is_held_once_in_ascending_parts_of_equal_size(method, n, u):
    cut = Cut(method, n, u)
    length = 3 * cut.multiple
    held = [cut.of_rank(length, rank) for rank in range(n)]
    assert {len(places) for places in held} == {length // n}
    assert sorted(np.concatenate(held)) == list(range(length))
    assert all((np.diff(places) > 0).all() for places in held)
    # A block is what its neighbours hold, in their order.
    for block in range(cut.blocks):
        parts = held[block * u : (block + 1) * u]
        assert np.array_equal(cut.of_block(length, block), np.concatenate(parts))


@cuts
def test_a_length_that_does_not_divide_is_refused(method, n, u):
    cut = Cut(method, n, u)
    for length in range(1, 2 * cut.multiple):
        if length % (cut.multiple if u == 1 else n):
            with pytest.raises(ShapeError, match=f"{length} positions cannot be cut"):
                cut.of_rank(length, 0)
    assert cut.multiple in (n, 2 * n)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="diagonal"):
        held_positions(8, 2, 0, "diagonal")
    assert set(LAYOUTS) == set(METHODS)


@cuts
def test_the_core_is_that_of_the_method_and_has_the_positions_of_its_block(
    method, n, u
):
    asked = u if method == "usp" else 0
    for rank in range(n):
        fields = {"heads": 12, "parallel_ulysses": asked}
        sequence = own_sequence(cut_recipe(method, 96, **fields), n, rank)
        core, cut = sequence.core, sequence.cut
        assert (cut.method, cut.ranks, cut.heads) == (method, n, u)
        assert np.array_equal(core.positions(96), sequence.own)
        if u > 1:
            assert isinstance(core, UlyssesCore) and core.axis.size == u
            core = core.core
        kind = GatheredCore if method == "allgather" else RingCore
        assert type(core) is (kind if n > u else LocalCore)
        block = cut.of_block(96, rank // u)
        assert np.array_equal(core.positions(96), block)


# --- tokens, labels, places -----------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "labels"),
    [
        ("ring", [[1, 2, 3, 4], [5, 6, 7, IGNORE]]),
        ("zigzag", [[1, 2, 7, IGNORE], [3, 4, 5, 6]]),
        ("striped", [[1, 3, 5, 7], [2, 4, 6, IGNORE]]),
        ("ulysses", [[1, 2, 3, 4], [5, 6, 7, IGNORE]]),
    ],
)
def test_labels_are_those_of_the_whole_sequence(method, labels):
    """A07"""
    batch = batch_of(np.arange(8))
    found = [x.labels(batch).tolist() for x in all_sequences(method, 2, 8)]
    assert found == [[row] for row in labels]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("context", [8, 7, 13])
def test_each_token_and_label_is_on_one_rank_and_what_is_added_has_none(
    method, n, context
):
    """A07"""
    tokens = np.random.default_rng(0).integers(2, 256, (3, context))
    batch, sequences = batch_of(tokens), all_sequences(method, n, context)
    length = sequences[0].length
    assert context <= length < context + 2 * n and length % n == 0
    whole = np.full((2, 3, length), -1)
    for x in sequences:
        assert x.length == length and len(x.own) == length // n
        whole[0][:, x.own], whole[1][:, x.own] = x.tokens(batch), x.labels(batch)
    assert np.array_equal(whole[0][:, :context], tokens)
    assert np.array_equal(whole[1][:, :context], batch.labels)
    assert (whole[0][:, context:] == 0).all()
    assert (whole[1][:, context:] == IGNORE).all()
    assert (whole[1] != IGNORE).sum() == 3 * (context - 1)


@FAMILIES
def test_positions_run_on_over_documents_unless_they_are_separate(family):
    """A09"""
    batch = batch_of([5, 6, 7, END, 5, 6, 7, END])
    for documents, places in (
        ("joined", [None, None]),
        ("separate", [[[0, 1, 2, 3]], [[2, 3, 0, 1]]]),
    ):
        fields = {"model_family": family, "data_documents": documents}
        sequences = all_sequences("zigzag", 2, 8, **fields)
        assert [x.own.tolist() for x in sequences] == [[0, 1, 6, 7], [2, 3, 4, 5]]
        firsts = [x.firsts(batch) for x in sequences]
        if documents == "joined":
            assert firsts == [None, None]
        else:
            assert all(f.tolist() == [[0] * 4 + [4] * 4] for f in firsts)
        found = [x.places(f) for x, f in zip(sequences, firsts, strict=True)]
        found = [None if p is None else p.tolist() for p in found]
        assert found == (places if family == "gpt" else [None, None])


@st.composite
def packed(draw):
    """Tokens with ends of documents anywhere, and how they are cut."""
    context, n = draw(st.integers(1, 30)), draw(st.sampled_from([1, 2, 4]))
    ids = st.lists(st.sampled_from([END, 7, 8]), min_size=context, max_size=context)
    return (
        draw(st.sampled_from(METHODS)),
        n,
        draw(st.lists(ids, min_size=1, max_size=3)),
    )


@given(packed())
def test_documents_begin_behind_each_end_and_places_with_them(case):
    """A09: places of learned positions count from there, and stay in the table."""
    method, n, tokens = case
    batch, context = batch_of(tokens), len(tokens[0])
    for x in all_sequences(method, n, context, data_documents="separate"):
        firsts = x.firsts(batch)
        assert firsts.shape == (len(tokens), x.length) and firsts.dtype == np.int64
        places = x.places(firsts)
        for row, ids in enumerate(tokens):
            ids = [*ids, *[0] * (x.length - context)]
            for i in range(x.length):
                before = [j + 1 for j in range(i) if ids[j] == END]
                assert firsts[row, i] == max(before, default=0)
            for place, i in zip(places[row], x.own, strict=True):
                assert place == min(i - firsts[row, i], context - 1)


@FAMILIES
@pytest.mark.parametrize("method", METHODS)
def test_what_is_added_has_places_in_the_table(method, family):
    for x in all_sequences(method, 4, 13, model_family=family):
        places = x.places(x.firsts(batch_of(np.arange(13))))
        if family == "llama":
            assert places is None
        else:
            assert places.tolist() == [np.minimum(x.own, 12).tolist()]


def test_tensor_ranks_can_cut_what_is_added():
    for tensor, context, length in ((2, 24, 24), (4, 24, 32), (1, 24, 24)):
        fields = {"parallel_tensor": tensor, "parallel_sequence": True}
        for x in all_sequences("zigzag", 2, context, **fields):
            assert x.length == length and len(x.own) % tensor == 0
    alone = all_sequences("zigzag", 1, 13, parallel_tensor=2, parallel_sequence=False)
    assert alone[0].length == 13 and alone[0].places(None) is None


# --- work -----------------------------------------------------------------------------


def work(method, n, firsts):
    """Pairs of a query and a key that it sees, by rank and hop.   →  (n, n)"""
    cut, length = Cut(method, n), firsts.shape[1]
    found = np.zeros((n, n), int)
    for rank, hop in np.ndindex(n, n):
        queries, keys = (cut.of_block(length, r % n) for r in (rank, rank - hop))
        found[rank, hop] = pairs(spans_between(queries, firsts[:, queries], keys))
    return found


def critical(found):
    """The slowest rank of each hop, beside what a rank does on average."""
    return found.max(axis=0).sum() / found.sum(axis=1).mean()


def causal(length):
    return np.zeros((1, length), np.int64)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_zigzag_is_the_same_work_for_all_in_every_hop(n, chunk):
    found = work("zigzag", n, causal(2 * n * chunk))
    assert (found == found[0]).all() and critical(found) == 1.0
    # Two of the four products of half blocks in each hop, which the first one halves
    assert (found[:, 1:] == 2 * chunk**2).all()
    assert (found[:, 0] == chunk * (2 * chunk + 1)).all()


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_contiguous_parts_leave_most_work_to_the_last_rank(n):
    block = 100
    found = work("ring", n, causal(n * block))
    exact = ((2 * n - 1) * block + 1) / (n * block + 1)
    assert critical(found) == pytest.approx(exact, rel=1e-12)
    assert critical(found) == pytest.approx((2 * n - 1) / n, rel=0.01)
    assert (np.count_nonzero(found, axis=1) == 1 + np.arange(n)).all()


def test_documents_are_shared_well_by_stripes_only():
    firsts = firsts_of([[10, 21, 17]])
    found = {m: critical(work(m, 4, firsts)) for m in ("zigzag", "ring", "striped")}
    rounded = {method: round(ratio, 2) for method, ratio in found.items()}
    assert rounded == {"zigzag": 1.97, "ring": 1.6, "striped": 1.08}


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_stripes_share_documents_of_real_lengths(n, seed):
    rng, length = np.random.default_rng(seed), 4096
    sizes = 1 + rng.lognormal(5.5, 1.2, 400).astype(int)
    ends = np.cumsum(sizes)
    count = np.searchsorted(ends, length)
    sizes = [*sizes[:count], length - ends[count - 1]]
    found = work("striped", n, firsts_of([[size for size in sizes if size]]))
    assert critical(found) < 1.1
    assert found.sum(axis=1).max() < 1.01 * found.sum(axis=1).mean()


@pytest.mark.parametrize("documents", [(), ((10, 21, 17), (48,))])
def test_spans_of_a_micro_batch_are_made_once_and_told_apart(documents):
    firsts = firsts_of(documents) if documents else None
    step = Step(np.arange(48), np.arange(2), firsts=firsts)
    blocks = [Cut("zigzag", 4).of_block(48, rank) for rank in range(4)]
    asked = list(product((0, 20, 40), blocks, [*blocks, np.arange(48)]))

    def make():
        return [spans_of(step, Heads(1, 1, 1, 1.0, w), *both) for w, *both in asked]

    found = make()
    for (window, queries, keys), spans in zip(asked, found, strict=True):
        seen = (causal(48) if firsts is None else firsts)[:, queries]
        if window:
            seen = np.maximum(seen, queries - window + 1)
        assert np.array_equal(spans, spans_between(queries, seen, keys))
    assert all(a is b for a, b in zip(make(), found, strict=True))


@pytest.mark.parametrize("method", ["ring", "zigzag", "striped"])
def test_all_work_is_done_once(method):
    for firsts in (causal(48), firsts_of([[10, 21, 17], [48]])):
        expected = (np.arange(48) - firsts + 1).sum()
        assert work(method, 4, firsts).sum() == expected
