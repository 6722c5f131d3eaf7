"""Faults of odd sizes that people really met: cuts, short sequences, ragged batches."""

import math

import numpy as np
import pytest
from parity.build import (
    FP64,
    IGNORE,
    TEXT,
    compare,
    layout_engine,
    make_batch,
    make_recipe,
    read_arrays,
    save_engine,
    serial_engine,
    take_step,
    write_tokens,
)

from mpipar.checkpoint import load, read_manifest, whole_fragments
from mpipar.config import read_recipe
from mpipar.data import Sampler, TokenStream, load_tokenizer
from mpipar.engine import make_sampler, open_grid
from mpipar.errors import ConfigError
from mpipar.layers.context import held_positions


def ranks(*counts):
    return [pytest.param(n, marks=pytest.mark.mpi(n)) for n in counts]


def refusal(ranks: int, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_recipe(ranks, *words)
    return str(caught.value)


# Labels at the edges of a cut sequence

NEXT = np.array([1, 2, 3, 4, 5, 6, 7, IGNORE])


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("contiguous", [[1, 2, 3, 4], [5, 6, 7, IGNORE]]),
        ("zigzag", [[1, 2, 7, IGNORE], [3, 4, 5, 6]]),
    ],
)
def test_labels_are_shifted_before_the_sequence_is_cut(layout, parts):
    """A07"""
    for rank, labels in enumerate(parts):
        assert NEXT[held_positions(8, 2, rank, layout)].tolist() == labels


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_no_label_is_lost_or_counted_twice(layout, cp):
    """A07: 7 valid labels in all."""
    held = [held_positions(8, cp, rank, layout) for rank in range(cp)]
    assert sorted(np.concatenate(held)) == list(range(8))
    assert sum(int((NEXT[places] != IGNORE).sum()) for places in held) == 7


# Short and odd sequences


@pytest.mark.parametrize("tp", ranks(1, 2, 4))
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("context", [1, 7])
@pytest.mark.parametrize("micro", [1, 3])
def test_short_sequences_agree_with_one_rank(comm, tp, family, context, micro):
    """A12"""
    words = [f"model.context={context}", f"model.family={family}", "model.kv_heads=2"]
    words += ["train.global_batch=3", f"train.micro_batch={micro}"]
    recipe = make_recipe(tp, f"parallel.tensor={tp}", *words)
    assert compare(recipe, comm).above(FP64) == {}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_one_position_gives_queries_and_keys_no_gradient(family):
    """A12: exactly 0, since the softmax over one key is 1."""
    words = [f"model.family={family}", "train.micro_batch=3", "train.global_batch=3"]
    engine = serial_engine(make_recipe(1, "model.context=1", *words))
    take_step(engine, make_batch(engine.recipe, 0))
    for p in engine.flat.parameters:
        idle = ".attention.q." in p.name or ".attention.k." in p.name
        assert p.grad.any() != idle, p.name


def test_a_sequence_that_tp_cannot_cut_is_refused():
    """A12"""
    words = ["parallel.tensor=2", "parallel.sequence=true", "model.context=7"]
    text = refusal(2, *words)
    assert "parallel.tensor = 2" in text
    assert "model.context = 7" in text


# Sizes that tp does not divide


@pytest.mark.parametrize(
    ("tp", "words", "named"),
    [
        (4, ["model.heads=6", "model.width=36"], "model.heads = 6"),
        (2, ["model.heads=6", "model.width=36", "model.kv_heads=3"], "kv_heads = 3"),
        (2, ["model.ffn=65"], "model.ffn = 65"),
    ],
)
def test_heads_and_widths_that_tp_cannot_cut_are_refused(tp, words, named):
    """A30"""
    assert named in refusal(tp, f"parallel.tensor={tp}", *words)


@pytest.mark.parametrize("sequence", ["false", "true"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.mpi(3)
def test_three_ranks_share_six_heads_and_an_uneven_vocabulary(comm, family, sequence):
    """A30: 3 key/value heads on 3 ranks, 101 rows as 34 + 34 + 33."""
    words = ["model.heads=6", "model.width=36", "model.kv_heads=3", "model.ffn=66"]
    words += ["model.context=9", f"parallel.sequence={sequence}"]
    recipe = make_recipe(3, "parallel.tensor=3", f"model.family={family}", *words)
    assert compare(recipe, comm).above(FP64) == {}


@pytest.mark.parametrize("tp", ranks(1, 2, 4))
def test_a_head_of_zeros_gives_the_loss_of_the_true_vocabulary(comm, tp):
    """A11: ln 101 = 4.61512, not that of a vocabulary padded for tp."""
    recipe = make_recipe(tp, f"parallel.tensor={tp}", "model.tied=false")
    with layout_engine(recipe, comm) as engine:
        head = engine.flat.parameters[-1]
        assert head.name == "head.weight"
        head.data[...] = 0.0
        loss = take_step(engine, make_batch(recipe, 0)).loss
        assert loss == pytest.approx(math.log(101), rel=1e-14)
        rows = engine.grid.world.all_gather_obj(head.local_shape[0])
        assert sum(rows) == 101


@pytest.mark.parametrize("tp", ranks(2, 4))
@pytest.mark.parametrize("kv", [1, 2])
def test_saved_weights_have_the_true_sizes_and_load_on_one_rank(comm, tmp_path, tp, kv):
    """A30: exactly 101 rows, and the recipe says 101; each head is saved once."""
    recipe = make_recipe(tp, f"parallel.tensor={tp}", f"model.kv_heads={kv}")
    serial = serial_engine(recipe)
    with layout_engine(recipe, comm) as engine:
        folder = save_engine(engine, comm.bcast(tmp_path))
    arrays, manifest = read_arrays(folder), read_manifest(folder)
    for kind in ("", "m/", "v/"):
        assert arrays[f"{kind}embedding/token/weight"].shape == (101, 32)
        assert arrays[f"{kind}blocks/0/attention/k/weight"].shape == (8 * kv, 32)
    assert "vocab = 101\n" in manifest.recipe
    exact = serial.flat.data.copy()
    serial.flat.data[...] = 0.0
    load(folder, manifest, whole_fragments(serial.flat.parameters), serial.ops)
    assert np.array_equal(serial.flat.data, exact)


# Ragged batches


def test_a_batch_that_data_ranks_cannot_share_is_refused():
    """A31"""
    assert "train.global_batch = 6" in refusal(4, "train.global_batch=6")


@pytest.mark.parametrize("dp", ranks(1, 2, 4))
@pytest.mark.parametrize("context", [16, 7])
def test_a_ragged_evaluation_is_the_mean_over_its_samples(comm, tmp_path, dp, context):
    """A31: 5 samples in micro-batches of 2 give one loss for every dp."""
    words = [f"model.context={context}", "train.global_batch=8", "train.micro_batch=2"]
    words += [f"data.source={write_tokens(comm, tmp_path)}", "train.eval_samples=5"]
    recipe, tokenizer = read_recipe(TEXT, words, ranks=dp), load_tokenizer("bytes")
    serial = serial_engine(recipe)
    with layout_engine(recipe, comm) as engine:
        sampler = make_sampler(recipe, tokenizer, engine.grid)
        assert sampler.eval_count == 5
        rounds = list(sampler.eval_batches())
        assert len(set(comm.allgather(len(rounds)))) == 1
        loss = engine.evaluate(rounds, sampler.eval_tokens)
        one_by_one = [
            serial.evaluate([batch], context)
            for batch in single_samples(sampler.stream, sampler.eval_count)
        ]
        assert loss == pytest.approx(np.mean(one_by_one), rel=1e-12)


def single_samples(stream: TokenStream, count: int):
    """The held-out samples of a stream, one a batch."""
    return Sampler(stream, 0, 1, 1, eval_samples=count).eval_batches()


@pytest.mark.parametrize("dp", ranks(1, 2, 4))
def test_training_batches_are_those_of_one_rank(comm, tmp_path, dp):
    """A31: 8 sequences a step on every dp, the same number of steps on every rank."""
    words = ["train.global_batch=8", "train.micro_batch=1"]
    source = f"data.source={write_tokens(comm, tmp_path)}"
    recipe = read_recipe(TEXT, [*words, source], ranks=dp)
    grid, _ = open_grid(recipe, comm)
    with grid:
        sampler = make_sampler(recipe, load_tokenizer("bytes"), grid)
        whole = Sampler(sampler.stream, recipe.train.seed, 8, 8)
        for step in (0, 1, 20):
            own = np.concatenate([b.tokens for b in sampler.train_batches(step)])
            together = np.concatenate(comm.allgather(own))
            assert np.array_equal(together, whole.train_batches(step)[0].tokens)
