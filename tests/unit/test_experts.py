"""Routing on one rank against loops, formulas and finite differences; and the rules."""

from dataclasses import replace

import numpy as np
import pytest
from layer_cases import BATCH, Case, Made, mixture, upstream
from numeric import assert_close, numeric_gradient
from parity.build import (
    gradients,
    make_batch,
    make_recipe,
    serial_engine,
    take_step,
    weights,
)
from unit.test_config_rules import SHORT, broken

from mpipar.comm import NullCommunicator
from mpipar.config import Experts, read_recipe
from mpipar.layers.base import Step
from mpipar.layers.expert import Router
from mpipar.layers.expert.choice import choose, spread
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.zero.flat import FlatState

E, S = 6, 5
GATES = [
    ("top_softmax", 2),
    ("top_softmax", 3),
    ("softmax", 1),
    ("softmax", 2),
    ("sigmoid", 1),
    ("sigmoid", 3),
]
of_gates = pytest.mark.parametrize(("kind", "active"), GATES)


# Choices


def choose_one_by_one(scores, count, groups, active_groups):
    """Of one token: the best expert of those that are left, again and again."""
    size = len(scores) // groups
    best = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    ranked = sorted(range(groups), key=lambda g: (-best[g], g))
    legal = ranked[: active_groups or groups]
    left = [e for e in range(len(scores)) if e // size in legal]
    return sorted(left, key=lambda e: (-scores[e], e))[:count]


@pytest.mark.parametrize("levels", [2, 4, 1000])
@pytest.mark.parametrize(
    ("groups", "active_groups"), [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (4, 3)]
)
def test_the_best_experts_are_chosen_and_of_equal_ones_the_first(
    levels, groups, active_groups
):
    scores = np.random.default_rng(1).integers(0, levels, (200, 12)) - 1.0
    found = choose(scores, 3, groups=groups, active_groups=active_groups)
    assert found.tolist() == [
        choose_one_by_one(row, 3, groups, active_groups) for row in scores.tolist()
    ]


def spread_one_by_one(chosen, positions, experts, length, capacity):
    """Kept choices and shares: every sequence by position, then by choice."""
    kept, shares = np.zeros(chosen.shape, bool), np.zeros((len(chosen), experts))
    k = chosen.shape[2]
    for b, sequence in enumerate(chosen):
        taken = [0] * experts
        for s in np.argsort(positions):
            for slot, expert in enumerate(sequence[s]):
                if positions[s] >= length:
                    continue
                shares[b, expert] += 1 / (k * length)
                is_full = capacity and taken[expert] >= capacity * k * length / experts
                kept[b, s, slot] = not is_full
                taken[expert] += 1
    return kept, shares


@pytest.mark.parametrize("length", [12, 9])
@pytest.mark.parametrize("capacity", [0.0, 0.3, 0.5, 1.0, 1.25])
def test_an_expert_takes_the_first_tokens_of_a_sequence(length, capacity):
    rng = np.random.default_rng(2)
    chosen = choose(rng.random((3 * 12, E)), 2).reshape(3, 12, 2)
    for positions in (np.arange(12), rng.permutation(12)):
        found = spread(chosen, positions, E, length, capacity, ())
        kept, shares = spread_one_by_one(chosen, positions, E, length, capacity)
        assert np.array_equal(found.kept, kept)
        assert_close(found.shares, shares, 1e-15)


# Gates and losses; the router's weight is the identity, so that logits are its input


def make_router(dtype="float64", weight=1.0, **rules):
    ops = NumpyOps(dtype)
    router = Router(
        "r", E, Experts(count=E, ffn=4, **rules), ops=ops, std=0.3, partial="",
        owner=True, speaks=True, sequence=(),
    )  # fmt: skip
    FlatState([list(router.parameters())], ops)
    router.weight.data[...] = weight * np.eye(E)
    return router


def route(router, z, **options):
    positions = np.arange(S)
    step = Step(positions=positions, samples=np.arange(BATCH), **options)
    return router.forward(z, positions, step, (BATCH, S))


def logits(dtype="float64"):
    return np.random.default_rng(3).standard_normal((BATCH * S, E)).astype(dtype)


@pytest.mark.parametrize("options", [{}, {"capacity": 0.5, "scale": 2.5}])
@of_gates
def test_gradients_of_gates_are_finite_differences(kind, active, options):
    router, z = make_router(router=kind, active=active, **options), logits()
    saved = route(router, z, length=S - 1)
    dgates = np.random.default_rng(4).standard_normal(saved.gates.shape)
    dz = router.backward(dgates.copy(), saved, np.arange(S))
    exact = numeric_gradient(
        lambda: float((route(router, z, length=S - 1).gates * dgates).sum()), z
    )
    assert_close(dz, exact, 1e-8)


def loss_of(z, chosen, rules, length, sequences):
    """What both losses add to that of a step, with choices that stay."""
    total = 0.0
    by_sequence = zip(z.reshape(BATCH, S, E), chosen.reshape(BATCH, S, -1), strict=True)
    for logits, experts in by_sequence:
        x = np.exp(logits[:length])
        scores = x / (1 + x) if rules.router == "sigmoid" else x
        p = (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
        f = [(experts[:length] == e).mean() for e in range(E)]
        total += rules.balance * E * float(f @ p)
        total += rules.z_loss * float((np.log(x.sum(axis=1)) ** 2).mean())
    return total / sequences


@pytest.mark.parametrize("length", [S, S - 2])
@pytest.mark.parametrize(
    "losses", [{"balance": 0.3}, {"z_loss": 0.2}, {"balance": 0.3, "z_loss": 0.2}]
)
@of_gates
def test_gradients_of_the_losses_are_finite_differences(kind, active, losses, length):
    router, z = make_router(router=kind, active=active, **losses), logits()
    saved = route(router, z, length=length, sequences=7, loss_scale=8.0)
    dz = router.backward(np.zeros_like(saved.gates), saved, np.arange(S))
    exact = numeric_gradient(
        lambda: loss_of(z, saved.chosen, router.rules, length, 7), z
    )
    assert_close(dz, 8 * exact, 1e-8)


@pytest.mark.parametrize("kind", ["top_softmax", "softmax", "sigmoid"])
def test_equal_scores_have_a_balance_loss_of_exactly_one(kind):
    """A14"""
    router = make_router(weight=0.0, router=kind, active=2, balance=1.0)
    saved = route(router, logits(), length=S)
    p = np.full((1, E), 1 / E)
    assert (E * (saved.shares * p).sum(axis=1) == 1).all()
    assert (saved.chosen == [0, 1]).all()
    z = np.zeros((BATCH * S, E))
    assert loss_of(z, saved.chosen, router.rules, S, BATCH) == pytest.approx(1, 1e-15)


def router_gradient(balance, times, **rules):
    """Of the weight, after the same micro-batch so many times."""
    case = Case("mixture", mixture(balance=balance, **rules))
    made = Made(case, NullCommunicator("tp"), S)
    made.step = replace(made.step, sequences=times * BATCH)
    for _ in range(times):
        y, saved = made.layer.forward(made.x(), made.step)
        made.layer.backward(upstream(y), saved)
    return made.layer.router.weight.grad.copy()


@of_gates
def test_the_balance_loss_is_linear_and_blind_to_micro_batches(kind, active):
    """A14"""
    rules = {"router": kind, "active": active}

    def added(balance, times=1):
        return router_gradient(balance, times, **rules) - router_gradient(
            0.0, times, **rules
        )

    one = added(0.5)
    assert np.abs(one).max() > 1e-3
    assert_close(added(1.0), 2 * one, 1e-12)
    for times in (2, 4):
        assert_close(added(0.5, times), one, 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [500.0, 1e4])
@of_gates
def test_huge_logits_give_finite_gates(kind, active, size, dtype):
    rules = {"router": kind, "active": active, "balance": 0.1, "z_loss": 0.1}
    router = make_router(dtype, **rules)
    signs = np.sign(logits())
    for z in (size * signs, np.full_like(signs, size), np.full_like(signs, -size)):
        saved = route(router, z.astype(dtype))
        assert np.isfinite(saved.gates).all()
        dz = router.backward(np.ones_like(saved.gates), saved, np.arange(S))
        assert np.isfinite(dz).all()


# Experts that have nothing to do


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("active", "bias", "idle"),
    [(1, [1e4, 0, 0, 0], {1, 2, 3}), (2, [1e4, 1e4, -1e4, -1e4], {2, 3})],
)
def test_idle_experts_have_a_gradient_of_zero(active, bias, idle, overlap):
    """A15"""
    rules = {"router": "sigmoid", "active": active, "bias_rate": 0.1, "balance": 0.1}
    made = Made(Case("mixture", mixture(**rules)), NullCommunicator("tp"), S)
    made.layer.parts = 1 + overlap
    made.layer.router.bias.data[...] = bias
    y, saved = made.layer.forward(made.x(), made.step)
    dx = made.layer.backward(upstream(y), saved)
    assert np.isfinite(y).all() and np.isfinite(dx).all()
    assert np.isfinite(made.flat.grad).all()
    for number, expert in enumerate(made.layer.experts):
        for p in expert.parameters():
            assert p.grad.shape == p.shape and p.grad.any() == (number not in idle)


# The bias


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_an_update_moves_the_bias_against_the_load_and_nothing_else_does(family):
    words = "experts.count=8 experts.bias_rate=0.25 experts.router=sigmoid"
    words += f" model.family={family} optimizer.weight_decay=0.5 train.clip=1e-3"
    engine = serial_engine(make_recipe(1, *words.split()))
    for step in range(3):
        before = weights(engine)
        result = take_step(engine, make_batch(engine.recipe, step))
        grads, after = gradients(engine), weights(engine)
        square = sum((g**2).sum() for g in grads.values())
        assert result.grad_norm == pytest.approx(square**0.5, rel=1e-12)
        for name, counts in result.loads.items():
            loads, bias = counts[:-1], f"{name}.router.bias"
            assert loads.sum() == 24 * 16 * 2
            moved = before[bias] - 0.25 * np.sign(loads - loads.mean())
            assert np.array_equal(after[bias], moved)
            assert not grads[bias].any()


# Rules

EIGHT = "experts.count=8 "


@pytest.mark.parametrize(
    ("ranks", "words", "text"),
    [
        (1, "experts.shared=1", "experts.shared = 1: there are no experts"),
        (1, "experts.capacity=1", "experts.capacity = 1: there are no experts"),
        (1, EIGHT + "experts.groups=3", "experts.groups = 3 must divide"),
        (1, EIGHT + "experts.groups=2 experts.active_groups=4",
            "experts.active_groups = 4 must be at most experts.groups = 2"),
        (1, EIGHT + "experts.active=9",
            "experts.active = 9 must be at most 8, experts.count"),
        (1, EIGHT + "experts.groups=4 experts.active_groups=1 experts.active=3",
            "experts.active = 3 must be at most 2, those of the active groups"),
        (1, EIGHT + "experts.active=1", "the router would not learn"),
        (1, EIGHT + "experts.dense_blocks=2",
            "experts.dense_blocks = 2 must be less than model.layers = 2"),
        (2, "parallel.expert=2", "parallel.expert = 2 needs experts"),
        (2, "experts.count=3 parallel.expert=2",
            "parallel.expert = 2 must divide experts.count = 3"),
        (2, EIGHT + "parallel.expert=4",
            "parallel.expert = 4 must divide parallel.context * parallel.data = 2"),
        (2, EIGHT + "parallel.expert=2 parallel.tensor=2",
            "parallel.expert = 2 must divide parallel.context * parallel.data = 1"),
        (2, EIGHT + "parallel.expert=4 parallel.tensor=2 parallel.expert_tensor=1",
            "must divide parallel.tensor * parallel.context * parallel.data = 2"),
        (2, "parallel.tensor=2 parallel.expert_tensor=2",
            "parallel.expert_tensor = 2 needs experts"),
        (4, EIGHT + "parallel.tensor=4 parallel.expert_tensor=2",
            "parallel.expert_tensor = 2 must be 1 or parallel.tensor = 4"),
        (2, EIGHT + "parallel.tensor=2 experts.ffn=3",
            "must divide experts.ffn = 3"),
        (2, EIGHT + "parallel.tensor=2 experts.ffn=3 experts.shared=1 "
            "parallel.expert_tensor=1",
            "experts.shared * experts.ffn = 1 * 3 = 3"),
        (2, EIGHT + "parallel.tensor=2 parallel.expert_tensor=1 model.context=63",
            "parallel.tensor = 2 must divide model.context = 63"),
    ],
)  # fmt: skip
def test_a_recipe_that_breaks_a_rule_is_refused(ranks, words, text):
    found = broken(ranks, *words.split())
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    ("ranks", "words", "shared"),
    [
        (1, "", 0),
        (1, EIGHT + "experts.active=8", 1),
        (1, EIGHT + "experts.active=1 experts.router=softmax", 1),
        (1, EIGHT + "experts.groups=4 experts.active_groups=1 experts.active=2", 1),
        (2, EIGHT + "experts.dense_blocks=1 parallel.expert=2", 1),
        (2, EIGHT + "parallel.context=2 parallel.expert=2", 1),
        (2, EIGHT + "parallel.tensor=2", 2),
        (2, EIGHT + "parallel.tensor=2 parallel.expert_tensor=1 parallel.expert=2", 1),
        (8, EIGHT + "parallel.tensor=2 parallel.expert=4", 2),
        (8, EIGHT + "parallel.tensor=2 parallel.expert=8 parallel.expert_tensor=1", 1),
        (2, EIGHT + "parallel.tensor=2 parallel.expert_tensor=1 experts.ffn=3", 1),
        (4, EIGHT + "parallel.tensor=2 parallel.context=2 parallel.expert_tensor=1 "
            "model.context=63", 1),
    ],
)  # fmt: skip
def test_legal_recipes_pass(ranks, words, shared):
    recipe = read_recipe(SHORT, words.split(), ranks=ranks)
    assert recipe.parallel.expert_tensor == shared
    assert recipe.experts.ffn == (int(words[-1]) if "ffn" in words else 256) * (
        recipe.experts.count > 0
    )
