"""Rules that single layers must keep: masks, biases, vocabulary, decay, bytes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from layer_cases import (
    BATCH,
    CASES,
    HEADS,
    RATE,
    VOCAB,
    Case,
    Made,
    Spy,
    attention,
    dropout,
    embedding,
    make_step,
    model,
    residual,
)
from layer_cases import head as make_head
from layer_cases import loss as make_loss
from layer_cases import row as make_row
from numeric import assert_close

from mpipar.comm.null import NullCommunicator
from mpipar.errors import ShapeError
from mpipar.layers.base import Step, nbytes
from mpipar.layers.cache import KeyValueCache
from mpipar.layers.parameter import Parameter, Stack, cut
from mpipar.layers.stream import Stream
from mpipar.models import build_model
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.zero.adamw import AdamW, Hyper
from mpipar.zero.flat import FlatState, Piece

TP = NullCommunicator("tp")
OPS = NumpyOps("float64")


def build(maker, **step):
    """A layer of one rank, and a step for 5 positions."""
    made = Made(Case("", maker), TP, 5)
    return made.layer, make_step(5, **step), made


# --- dropout --------------------------------------------------------------------------


def mask(rate=0.5, *, name="site", shape=(BATCH, 5, 40), ops=OPS, **step):
    """Factors that a dropout layer applies."""
    layer = dropout(rate)(ops=ops, stream=Stream(TP, sequence=False))
    layer.name = name
    y, _ = layer.forward(np.ones(shape, ops.dtype), make_step(shape[1], **step))
    return y


def test_dropout_keeps_half_and_doubles_it():
    """A08"""
    factors = mask(shape=(BATCH, 5, 10_000))
    assert abs((factors != 0).mean() - 0.5) < 0.02
    assert set(np.unique(factors)) == {0.0, 2.0}


def test_masks_are_equal_on_every_call_and_in_both_types():
    """A08"""
    assert np.array_equal(mask(), mask())
    assert np.array_equal(mask(), mask(ops=NumpyOps("float32")))


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"seed": 12}, {"number": 3}, {"samples": np.array([4, 9])},
     {"positions": np.arange(5, 10)}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_masks_differ_by_site_seed_step_sample_and_position(change):
    """A08"""
    agreement = (mask() == mask(**change)).mean()
    assert 0.35 < agreement < 0.65


def test_a_mask_follows_its_sample_and_position_into_another_batch():
    swapped = mask(samples=np.array([8, 3]), positions=np.arange(5)[::-1])
    assert np.array_equal(swapped, mask()[::-1, ::-1])


def attention_factors(s=64, **step):
    made = Made(Case("", attention(dropout=0.5)), TP, s, ops=Spy("float64"))
    made.layer.forward(made.x(), make_step(s, **step))
    return made.ops.factors


def test_attention_masks_of_heads_and_samples_differ():
    """A08"""
    factors = attention_factors()
    assert factors.shape == (BATCH, HEADS, 64, 64)
    assert abs((factors != 0).mean() - 0.5) < 0.02
    flat = (factors != 0).reshape(BATCH * HEADS, -1)
    for i in range(len(flat)):
        for other in flat[:i]:
            assert 0.4 < (flat[i] == other).mean() < 0.6


@pytest.mark.parametrize(
    "maker, plain",
    [(dropout(0.5), dropout(0.0)), (residual(0.5), residual(0.0)),
     (attention(dropout=0.5), attention())],
    ids=["Dropout", "Residual", "attention"],
)  # fmt: skip
def test_dropout_is_off_outside_training(maker, plain):
    made, bare = (Made(Case("", m), TP, 5) for m in (maker, plain))
    y, _ = made.layer.forward(made.x(), make_step(5, training=False))
    assert np.array_equal(y, bare.layer.forward(bare.x(), bare.step)[0])


# --- loss and vocabulary --------------------------------------------------------------


def test_zero_weights_give_the_entropy_of_the_vocabulary():
    """A11"""
    stream = Stream(TP, sequence=False)
    layer = make_loss(OPS, stream, 101)
    step = make_step(5)
    total, saved = layer.forward(np.zeros((BATCH, 5, 101)), step)
    assert total / step.valid == pytest.approx(math.log(101), rel=1e-14)
    assert round(math.log(101), 5) == 4.61512
    dz, _ = layer.backward_input(None, saved)
    onehot = np.arange(101) == step.labels[..., None]
    expected = np.where(step.labels[..., None] < 0, 0.0, 1 / 101 - onehot)
    assert_close(dz, expected / step.valid, 1e-14)


def test_tokens_without_label_count_for_nothing():
    layer, step, made = build(make_head)
    x = made.x()
    _, saved = layer.forward(x, step)
    missing = step.labels < 0
    dx = layer.backward(None, saved)
    assert missing.any() and not dx[missing].any() and dx[~missing].all()
    none = make_step(5, labels=np.full((BATCH, 5), -100), valid=0)
    total, saved = layer.forward(x, none)
    assert total == 0.0 and not layer.backward(None, saved).any()


def test_losses_are_summed_and_gradients_divided_by_the_valid_labels():
    layer, step, made = build(make_head)
    total, saved = layer.forward(made.x(), step)
    dx = layer.backward(None, saved)
    more = make_step(5, valid=4 * step.valid)
    again, saved = layer.forward(made.x(), more)
    assert again == total
    assert_close(4 * layer.backward(None, saved), dx, 1e-14)


# --- row-cut bias, one position -------------------------------------------------------


def test_zero_input_gives_the_bias_and_ones_count_the_tokens():
    """A03"""
    layer, step, _ = build(make_row(True))
    y, saved = layer.forward(np.zeros((2, 3, 12)), step)
    assert np.array_equal(y, np.broadcast_to(layer.bias.data, y.shape))
    layer.backward(np.ones_like(y), saved)
    assert np.array_equal(layer.bias.grad, np.full(8, 6.0))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_one_position_attends_to_itself(kv_heads):
    """A12"""
    made = Made(Case("", attention(kv_heads)), TP, 1)
    _, saved = made.layer.forward(made.x(), make_step(1))
    h = 2
    v = saved.qkv[..., (HEADS + kv_heads) * h :].reshape(BATCH, 1, kv_heads, h)
    o = saved.outputs.x.reshape(BATCH, 1, HEADS, h)
    assert np.array_equal(o, np.repeat(v, HEADS // kv_heads, axis=2))


# --- decay ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_decay_is_for_matrices_and_embeddings_not_for_gains_and_biases(family, is_tied):
    """A18"""
    made = Made(Case("", model(family, is_tied=is_tied), "ids", "loss"), TP, 5)
    made.flat.data[...] = 1.0
    hyper = Hyper(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0)
    (unit,) = made.flat.units
    whole = Piece(unit, 0, unit.size, made.flat.data, made.flat.grad)
    assert AdamW([whole], OPS, hyper).update(0.1, 0.0)
    assert {len(p.shape) for p in made.flat.parameters} == {1, 2}
    for p in made.flat.parameters:
        is_matrix = p.name.endswith(".weight")
        assert np.array_equal(p.data, np.full(p.shape, 0.99 if is_matrix else 1.0))


# --- bytes ----------------------------------------------------------------------------


def test_bytes_count_whole_bases_once_and_no_step():
    x, y = np.zeros(10), np.zeros(6, "float32")
    assert nbytes(x) == nbytes(x, x, [x], (x[2:4], x.reshape(2, 5)[1])) == 80
    assert nbytes(x[:1]) == 80
    assert nbytes([x], None, 3, 0.5, (y,), make_step(5)) == 80 + 24
    assert nbytes() == nbytes(None, []) == 0
    with pytest.raises(TypeError, match="str"):
        nbytes([x, "text"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_saved_bytes_follow_the_compute_type(dtype):
    for case in CASES:
        made = Made(case, TP, 5, ops=NumpyOps(dtype))
        x = made.x().astype(dtype) if case.enters != "ids" else made.x()
        _, saved = made.layer.forward(x, made.step)
        assert case.holds(nbytes(saved), made.layer.cost(BATCH, 5).saved), case.name


# --- parameters -----------------------------------------------------------------------


def test_cuts_are_even_and_leave_nothing_out():
    assert [cut(13, 4, i) for i in range(4)] == [(0, 4), (4, 7), (7, 10), (10, 13)]
    assert [cut(2, 3, i) for i in range(3)] == [(0, 1), (1, 2), (2, 2)]


def test_a_stack_is_a_view_of_neighbouring_parameters_and_refuses_others():
    parts = [
        Parameter(name, (rows, 3), ((0, rows), (0, 3)), "zeros")
        for name, rows in (("a", 2), ("b", 4))
    ]
    flat = FlatState([parts], OPS)
    stack = Stack(parts)
    stack.data[...] = np.arange(18).reshape(6, 3)
    stack.grad[...] = 1.0
    assert stack.rows == 6 and np.array_equal(flat.data, np.arange(18))
    assert np.array_equal(parts[1].data, np.arange(6, 18).reshape(4, 3))
    assert flat.grad.all()
    with pytest.raises(ShapeError, match="not adjacent"):
        Stack(parts[::-1]).data.any()


def test_starting_values_are_those_of_init_and_seed():
    made = Made(Case("", model("gpt", is_tied=True), "ids", "loss"), TP, 5)
    made.flat.initialize(seed=3)
    first = made.flat.data.copy()
    for p in made.flat.parameters:
        constant = {"ones": 1.0, "zeros": 0.0}.get(p.init)
        if constant is None:
            assert 0.7 < p.data.std() / p.std < 1.3
        else:
            assert (p.data == constant).all()
    made.flat.initialize(seed=3)
    assert np.array_equal(first, made.flat.data)


# --- generation -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_logits_from_a_cache_are_those_of_the_whole_prefix(family):
    section = SimpleNamespace(
        family=family, layers=2, width=8, heads=4, kv_heads=2, ffn=12, context=9,
        vocab=VOCAB, tied=False, dropout=RATE, activation="gelu", rope_theta=100.0,
        window=0, norm_eps=1e-5,
    )  # fmt: skip
    whole = build_model(section, ops=OPS, tp=TP, sequence=False)
    FlatState(whole.groups().parameters, OPS).initialize(0)
    ids = np.random.default_rng(0).integers(0, VOCAB, (BATCH, 9))
    cache = KeyValueCache(9, ops=OPS)

    def logits(start, stop, kept):
        places = np.arange(start, stop)
        step = Step(places, np.arange(BATCH), training=False, cache=kept)
        return whole.logits(ids[:, start:stop], step)

    for start, stop in ((0, 3), (3, 4), (4, 8), (8, 9)):
        expected = logits(0, stop, None)
        assert expected.shape == (BATCH, VOCAB)
        assert_close(logits(start, stop, cache), expected, 1e-12)
        assert cache.length == stop


def test_embedding_rows_of_absent_ids_get_no_gradient():
    made = Made(Case("", embedding(), "ids"), TP, 5)
    ids = np.array([[1, 1, 4, 4, 4], [0, 1, 2, 2, 12]])
    _, saved = made.layer.forward(ids, made.step)
    made.layer.backward(np.ones((BATCH, 5, 8)), saved)
    expected = np.bincount(ids.ravel(), minlength=VOCAB)[:, None] * np.ones(8)
    assert np.array_equal(made.layer.token.grad, expected)


# --- documents ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_packed_documents_train_as_if_each_were_alone(family):
    """A09: places begin anew, and no document sees another."""
    s, build = 17, model(family, is_tied=True)
    packed = Made(Case("", build, "ids", "loss", is_packed=True), TP, s)
    step, x = packed.step, packed.x()
    total, saved = packed.layer.forward(x, step)
    packed.layer.backward(None, saved)
    single = Made(Case("", build, "ids", "loss"), TP, s)
    losses, firsts = [], step.firsts
    for row, first in {(r, f) for r in range(BATCH) for f in firsts[r]}:
        here = np.flatnonzero(firsts[row] == first)
        one = Step(
            np.arange(len(here)), step.samples[[row]],
            labels=step.labels[[row]][:, here], valid=step.valid,
        )  # fmt: skip
        loss, saved = single.layer.forward(x[[row]][:, here], one)
        single.layer.backward(None, saved)
        losses.append(loss)
    assert len(losses) == 5
    assert total == pytest.approx(sum(losses), rel=1e-12)
    assert_close(packed.flat.grad, single.flat.grad, 1e-12)
