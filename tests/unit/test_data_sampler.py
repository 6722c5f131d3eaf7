"""The order of samples, in training and evaluation, over layouts."""

import itertools

import numpy as np
import pytest

from mpipar.data import IGNORE, Sampler, TokenStream, check_batch
from mpipar.data.order import permuted
from mpipar.errors import ConfigError

S = 4


def order(n, seed=1, epoch=0):
    return permuted(np.arange(n), n, seed, np.full(n, epoch))


def sampler(train, held_out=0, **options):
    """Return a sampler over numbered tokens: train sample i starts with i·S."""
    tokens = (train + held_out) * S + 2
    share = (held_out * S + 1.5) / tokens if held_out else 0
    stream = TokenStream(np.arange(tokens), S, share, "numbers")
    assert (stream.train_samples, stream.held_out_samples) == (train, held_out)
    defaults = {"seed": 3, "global_batch": 8, "micro_batch": 2}
    return Sampler(stream, **(defaults | options))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_no_sample_comes_twice_in_an_epoch(n):
    for seed, epoch in itertools.product((0, 1, -7, 1 << 80), range(4)):
        assert sorted(order(n, seed, epoch).tolist()) == list(range(n))


def test_a_huge_corpus_needs_no_memory_for_its_order():
    n = (1 << 40) - 3
    places = np.array([0, 1, 2, n - 1])
    samples = permuted(places, n, 5, np.zeros(4, np.int64))
    assert len(set(samples.tolist())) == 4
    assert ((samples >= 0) & (samples < n)).all()


def test_orders_of_epochs_and_seeds_differ_and_are_well_mixed():
    n = 1000
    orders = [order(n, seed, epoch) for seed in range(5) for epoch in range(5)]
    for one, other in itertools.combinations(orders, 2):
        # Two random orders agree in one place on average
        assert (one == other).sum() < 10
    for one in orders:
        assert abs(np.corrcoef(np.arange(n), one)[0, 1]) < 0.15
        neighbours = np.abs(np.diff(one))
        assert 0.25 * n < neighbours.mean() < 0.42 * n


def test_every_order_of_three_samples_occurs_about_as_often():
    orders = [tuple(order(3, seed=9, epoch=epoch)) for epoch in range(1200)]
    counts = {one: orders.count(one) for one in set(orders)}
    assert len(counts) == 6
    assert min(counts.values()) > 140


def test_the_order_is_pinned():
    """A change here would break the resuming of every run."""
    assert order(10, seed=1).tolist() == [6, 1, 9, 0, 3, 7, 8, 4, 5, 2]
    assert order(10, seed=1, epoch=1).tolist() == [6, 2, 1, 0, 5, 3, 7, 4, 9, 8]
    assert order(1000, seed=1)[:5].tolist() == [573, 381, 772, 698, 27]


@pytest.mark.parametrize("n", [1, 3, 7, 8, 100])
def test_every_layout_sees_the_same_samples(n):
    whole = [
        batch
        for step in range(5)
        for batch in sampler(n, global_batch=8, micro_batch=8).train_batches(step)
    ]
    for dp, micro in [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (4, 2), (8, 1)]:
        layout = {"micro_batch": micro, "dp_size": dp}
        ranks = [sampler(n, dp_rank=rank, **layout) for rank in range(dp)]
        for step, batch in enumerate(whole):
            parts = [part for rank in ranks for part in rank.train_batches(step)]
            assert len(parts) == 8 // micro
            for field in ("tokens", "labels", "samples"):
                joined = np.concatenate([getattr(part, field) for part in parts])
                np.testing.assert_array_equal(joined, getattr(batch, field))


def test_training_takes_every_sample_once_an_epoch():
    batches = [b for step in range(5) for b in sampler(10).train_batches(step)]
    starts = np.concatenate([b.tokens[:, 0] for b in batches]) // S
    for epoch in range(4):
        assert sorted(starts[10 * epoch : 10 * epoch + 10]) == list(range(10))
    numbers = np.concatenate([b.samples for b in batches])
    assert numbers.tolist() == list(range(40))


def test_labels_are_the_next_tokens():
    (batch,) = sampler(10, global_batch=2).train_batches(0)
    assert batch.tokens.shape == batch.labels.shape == (2, S)
    assert batch.tokens.dtype == batch.labels.dtype == batch.samples.dtype == np.int64
    assert batch.tokens.flags.c_contiguous
    assert batch.labels.flags.c_contiguous
    np.testing.assert_array_equal(batch.labels, batch.tokens + 1)
    assert sampler(10).valid_tokens == 8 * S


@pytest.mark.parametrize(("batch", "micro", "dp"), [(6, 1, 4), (8, 3, 2), (8, 0, 2)])
def test_a_global_batch_that_does_not_divide_is_refused(batch, micro, dp):
    """A31: global batch 6 on four data ranks."""
    with pytest.raises(ConfigError, match=f"global_batch = {batch} must be a multiple"):
        sampler(10, global_batch=batch, micro_batch=micro, dp_size=dp)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_evaluation_is_the_mean_over_exactly_the_held_out_samples(dp):
    """A31: 5 samples in micro-batches of 2; on two ranks [0,1],[4] and [2,3],[]."""
    ranks = [sampler(9, 5, dp_rank=rank, dp_size=dp) for rank in range(dp)]
    batches = [list(rank.eval_batches()) for rank in ranks]
    assert {len(own) for own in batches} == {{1: 3, 2: 2, 4: 1}[dp]}
    total, seen = 0.0, []
    for batch in itertools.chain(*batches):
        assert batch.tokens.shape == (2, S)
        check_batch(batch.tokens, batch.labels, ranks[0].stream.ids.size)
        counts = batch.labels != IGNORE
        total += np.sqrt(batch.labels[counts]).sum()
        seen += batch.samples[counts.all(axis=1)].tolist()
        assert (counts.all(axis=1) == counts.any(axis=1)).all()
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert ranks[0].eval_tokens == 5 * S
    held_out = ranks[0].stream.held_out
    mean = np.sqrt(held_out[1 : 5 * S + 1]).mean()
    assert total / ranks[0].eval_tokens == pytest.approx(mean, rel=1e-14)
    if dp == 2:
        assert [[b.labels[:, 0].tolist() for b in own] for own in batches] == [
            [held_out[[1, 5]].tolist(), [held_out[17], IGNORE]],
            [held_out[[9, 13]].tolist(), [IGNORE, IGNORE]],
        ]


@pytest.mark.parametrize(("asked", "count"), [(0, 5), (3, 3), (5, 5), (99, 5)])
def test_evaluation_takes_what_is_asked_and_there(asked, count):
    one = sampler(9, 5, eval_samples=asked)
    assert one.eval_count == count
    labels = np.concatenate([b.labels for b in one.eval_batches()])
    assert (labels != IGNORE).sum() == one.eval_tokens == count * S


def test_evaluation_without_held_out_samples_is_empty():
    assert list(sampler(9).eval_batches()) == []
    assert sampler(9).eval_tokens == 0
