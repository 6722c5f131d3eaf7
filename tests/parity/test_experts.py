"""Experts that ranks share give the serial loss, gradients and weights, whatever the
router and the other axes; and what the comparison notices."""

import random
from collections.abc import Iterator
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from parity import test_continuous
from parity.build import (
    FP32,
    FP64,
    box_errors,
    compare,
    find_idle,
    gradients,
    layout_engine,
    make_batch,
    make_recipe,
    off,
    own_batches,
    reference,
    region,
    save_engine,
    serial_engine,
    take_step,
    write_tokens,
)
from parity.test_resume import hops

from mpipar.config import Recipe
from mpipar.config.kinds import METHODS
from mpipar.generate import run_generation
from mpipar.verify import run_verification

MODEL = "experts.count=8 model.ffn=16 train.global_batch=16"
EP2, TP2, PP2, CP2 = (
    f"parallel.{axis}=2" for axis in ("expert", "tensor", "pipeline", "context")
)
APART, CUT = "parallel.expert_tensor=1", "parallel.sequence=true"
ONE = "experts.router=softmax experts.active=1"
SIGMOIDS = "experts.router=sigmoid experts.active=4 experts.bias_rate=0.01"
GROUPS = "experts.groups=4 experts.active_groups=2 experts.scale=2.5"
ORDER = '["dp","pp","tp","cp"]'
LOSSES = "experts.balance=0.1 experts.z_loss=0.01"
# (ranks, words)
LAYOUTS = [
    (2, f"{EP2} train.micro_batch=4"),
    (2, f"{EP2} {LOSSES} {ONE} parallel.expert_overlap=true experts.dense_blocks=1"),
    (2, f"{TP2} {LOSSES} {SIGMOIDS} {CUT} experts.capacity=1 experts.shared=1"),
    (2, f"{EP2} {TP2} {LOSSES} {SIGMOIDS} {APART} experts.capacity=0.75 "
        "model.dropout=0.1"),
    (2, f"{EP2} {CP2} {LOSSES} {GROUPS} {SIGMOIDS} model.context=13 parallel.zero=1"),
    (4, f"{EP2} {LOSSES} {SIGMOIDS} parallel.zero=3 train.micro_batch=1"),
    (4, f"parallel.expert=4 {TP2} {CUT} {APART} {LOSSES} parallel.zero=2 "
        "model.family=llama"),
    (4, f"{EP2} {TP2} experts.shared=1 {ONE} {LOSSES} train.recompute=full"),
    (4, f"{EP2} {PP2} parallel.schedule=zb-h1 train.micro_batch=2 {LOSSES} {SIGMOIDS}"),
    (4, f"parallel.expert=4 {CP2} parallel.context_method=ring experts.capacity=0.5 "
        f"{LOSSES} model.family=llama train.micro_batch=2"),
    (4, f"{EP2} {CP2} {PP2} parallel.partition=measured {LOSSES} train.micro_batch=4"),
    (4, f"{EP2} {TP2} {APART} {LOSSES} parallel.zero=2 parallel.order={ORDER}"),
    # A stage without experts, of which others are shared by halves
    (4, f"{PP2} experts.dense_blocks=1 parallel.zero=1 parallel.zero_shard=1 "
        "train.micro_batch=4"),
]  # fmt: skip
# Values of every factor of the full tier; words of a recipe, but for `micro`.
FACTORS = {
    "ep": [f"parallel.expert={n}" for n in (1, 2, 4, 8)],
    "tp": ["", TP2, f"{TP2} {CUT}", f"{TP2} {APART}", f"{TP2} {CUT} {APART}"],
    "pp": ["", PP2, f"{PP2} parallel.schedule=zb-h1", f"{PP2} parallel.schedule=zb-v"],
    "cp": ["", *(f"{CP2} parallel.context_method={m}" for m in METHODS)],
    "order": ["", f"parallel.order={ORDER}"],
    "zero": [
        *(f"parallel.zero={stage}" for stage in range(4)),
        *(f"parallel.zero={stage} parallel.zero_shard=1" for stage in (1, 3)),
    ],
    "router": [f"experts.router={r}" for r in ("top_softmax", "softmax", "sigmoid")],
    "active": [f"experts.active={k}" for k in (1, 2, 4)],
    "groups": ["", GROUPS],
    "capacity": ["", "experts.capacity=0.75"],
    "balance": ["", "experts.balance=0.1"],
    "z_loss": ["", "experts.z_loss=0.01"],
    "bias": ["", "experts.bias_rate=0.01"],
    "shared": ["", "experts.shared=1"],
    "dense": ["", "experts.dense_blocks=1"],
    "overlap": ["", "parallel.expert_overlap=true"],
    "dropout": ["", "model.dropout=0.1"],
    "recompute": [f"train.recompute={kind}" for kind in ("none", "full", "selective")],
    "family": ["model.family=gpt", "model.family=llama"],
    "length": ["", "odd"],
    "micro": ["1", "2"],
}
AXES = ("tensor", "pipeline", "context")
Case = dict[str, str]


def is_legal(case: Case) -> bool:
    """Whether a part of a case, at least, breaks no rule on 8 ranks."""
    if case.get("router", "").endswith("top_softmax") and "=1" in case.get(
        "active", ""
    ):
        return False
    tp, pp, cp = (case.get(axis, "") for axis in ("tp", "pp", "cp"))
    held = (2 if pp else 1) * (2 if tp and APART not in tp else 1)
    return 8 // held % int(case.get("ep", "=1")[-1]) == 0


def covering() -> Iterator[Case]:
    """Cases in which each pair of values of two factors occurs that is legal."""
    rng = random.Random(1)
    todo = {
        frozenset({a: x, b: y}.items())
        for a, b in combinations(FACTORS, 2)
        for x, y in product(FACTORS[a], FACTORS[b])
        if is_legal({a: x, b: y})
    }
    while todo:
        case = dict(min(todo, key=sorted))
        for name in rng.sample([n for n in FACTORS if n not in case], len(FACTORS) - 2):
            legal = [v for v in FACTORS[name] if is_legal(case | {name: v})]
            met = [
                sum(frozenset({(name, v), x}) in todo for x in case.items())
                for v in legal
            ]
            case[name] = legal[met.index(max(met))]
        todo -= set(map(frozenset, combinations(case.items(), 2)))
        yield {name: case[name] for name in FACTORS}


def recipe_of_case(case: Case) -> Recipe:
    *words, length, micro = case.values()
    words = " ".join(words).split()
    sizes = dict(word.split("=") for word in words)
    axes = [int(sizes.get(f"parallel.{axis}", 1)) for axis in AXES]
    # Sequences of a data rank; a pipeline has four micro-batches
    own = 4 * prod(axes)
    # No multiple of what most context methods need
    odd = 14 if case["tp"] else 13
    return make_recipe(
        8, *MODEL.split(), *words,
        "train.global_batch=32",
        f"train.micro_batch={own // (4 if case['pp'] else int(micro))}",
        f"model.context={odd if length else 16}",
        f"model.layers={4 if 'zb-v' in case['pp'] else 2}",
    )  # fmt: skip


def on_ranks(cases: list) -> pytest.MarkDecorator:
    """Parameter words, each on as many ranks as are said."""
    params = [
        pytest.param(words, marks=pytest.mark.mpi(n, timeout=120)) for n, words in cases
    ]
    return pytest.mark.parametrize("words", params)


@on_ranks(LAYOUTS)
def test_shared_experts_give_what_one_rank_computes(comm, words):
    recipe = make_recipe(comm.size, *MODEL.split(), *words.split())
    assert compare(recipe, comm, steps=2).above(FP64) == {}


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
@pytest.mark.mpi(8, timeout=240)
def test_every_pair_of_features_agrees(comm, part):
    for case in list(covering())[part::4]:
        assert compare(recipe_of_case(case), comm, steps=2).above(FP64) == {}, case


def test_the_full_tier_covers_every_pair():
    cases = list(covering())
    assert len(cases) < 60
    for a, b in combinations(FACTORS, 2):
        every = {(x, y) for x, y in product(FACTORS[a], FACTORS[b])}
        met = {(case[a], case[b]) for case in cases}
        assert met == {(x, y) for x, y in every if is_legal({a: x, b: y})}


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.mpi(2)
def test_they_agree_in_fp32(comm, family):
    words = f"{MODEL} {EP2} {LOSSES} {SIGMOIDS} experts.shared=1 train.precision=fp32"
    recipe = make_recipe(2, *words.split(), f"model.family={family}")
    assert compare(recipe, comm).above(FP32) == {}


@on_ranks([(2, EP2), (2, f"{CP2} model.context=13"), (4, f"{EP2} {TP2} {APART} {CUT}")])
def test_evaluation_agrees(comm, words):
    """An expert has its capacity then too."""
    given = f"{MODEL} {LOSSES} {SIGMOIDS} {words} experts.capacity=0.5"
    recipe = make_recipe(comm.size, *given.split())
    batch = make_batch(recipe, 0)
    exact = serial_engine(recipe).evaluate([batch], 100)
    with layout_engine(recipe, comm) as engine:
        found = engine.evaluate(own_batches(engine, batch), 100)
    assert found == pytest.approx(exact, rel=1e-12)


@on_ranks([(2, EP2), (2, f"{EP2} {TP2} {APART} parallel.zero=3")])
def test_bf16_is_near_fp32(comm, words):
    found = []
    for precision in ("fp32", "bf16"):
        given = f"{MODEL} {words} {LOSSES} {SIGMOIDS} train.precision={precision}"
        recipe = make_recipe(2, *given.split())
        with layout_engine(recipe, comm) as engine:
            steps = [take_step(engine, make_batch(recipe, n)) for n in range(3)]
        found.append([(step.loss, step.grad_norm) for step in steps])
    assert np.array(found[1]) == pytest.approx(np.array(found[0]), rel=0.02)
    assert found[0] != found[1]


@on_ranks(
    [
        (2, f"{PP2} train.micro_batch=6"),
        (4, f"{EP2} {PP2} parallel.zero=2 train.micro_batch=3"),
    ]
)
def test_training_without_a_break_agrees(comm, words):
    given = f"experts.count=8 {LOSSES} {SIGMOIDS} {words}"
    test_continuous.test_it_is_the_serial_loop_with_a_delay(comm, comm.size, given)


@pytest.mark.mpi(2)
def test_verify_agrees(comm, tmp_path):
    words = f"{MODEL} {EP2} {LOSSES} {SIGMOIDS} experts.shared=1 experts.capacity=1"
    source = f"data.source={write_tokens(comm, tmp_path)}"
    recipe = make_recipe(2, source, *words.split())
    assert run_verification(recipe, comm, steps=2) is True


@on_ranks(
    [(2, ""), (2, EP2), (4, EP2), (4, f"{EP2} {TP2}"), (4, f"{EP2} {TP2} {APART}")]
)
def test_gradients_of_experts_are_as_large_as_on_one_rank(comm, words):
    """A13"""
    more = "experts.count=4 experts.router=softmax"
    recipe = make_recipe(comm.size, *f"{MODEL} {more} {words}".split())
    exact = reference(recipe, 1).gradients[0]
    with layout_engine(recipe, comm) as engine:
        take_step(engine, make_batch(recipe, 0))
        own = [p for p in engine.state.parameters if ".experts." in p.name]
        for p in own:
            its = exact[p.name][region(p)]
            assert its.any()
            ratio = float((p.grad * its).sum() / (its * its).sum())
            assert ratio == pytest.approx(1, rel=1e-12), p.name
    # Of two blocks, with two matrices an expert
    assert len(own) == 2 * 2 * 4 // recipe.parallel.expert


BIASES = {
    "experts of rank 0": (2, [1e4] * 4 + [-1e4] * 4),
    "one expert": (1, [1e4] + [0.0] * 7),
}


@pytest.mark.parametrize("case", BIASES)
@on_ranks(
    [
        (2, EP2),
        (2, f"{EP2} parallel.expert_overlap=true experts.capacity=0.5"),
        (2, f"{EP2} {TP2} {APART}"),
        (4, "parallel.expert=4 train.recompute=full"),
        (4, f"{EP2} {TP2} {CUT}"),
    ]
)
def test_ranks_without_a_token_go_on(comm, words, case):
    """A15"""
    active, bias = BIASES[case]
    given = f"{MODEL} {words} {LOSSES} {SIGMOIDS} experts.active={active}"
    recipe = make_recipe(comm.size, *given.split())
    batch, alone = make_batch(recipe, 0), serial_engine(recipe)
    push(alone, bias)
    expected, exact = take_step(alone, batch), gradients(alone)
    with layout_engine(recipe, comm) as engine:
        push(engine, bias)
        result = take_step(engine, batch)
        found = box_errors(engine, "gradients", exact, find_idle(exact))
        assert {n: e for n, e in found.items() if not e <= FP64} == {}
        assert off(result.loss, expected.loss) < FP64
        for name, loads in result.loads.items():
            assert np.array_equal(loads, expected.loads[name])
            assert not loads[:-1][np.array(bias) < 1e4].any()
        for p in engine.state.parameters:
            if ".experts." in p.name:
                number = int(p.name.split(".experts.")[1].split(".")[0])
                assert p.grad.any() == (bias[number] == 1e4), p.name


def push(engine, bias):
    """Sets the bias of every router."""
    for p in engine.state.parameters:
        if p.name.endswith("router.bias"):
            p.data[...] = bias


# Checkpoints

SAVED = "experts.count=8 model.layers=3 model.ffn=16 model.dropout=0.1 experts.shared=1"
SAVED += f" experts.dense_blocks=1 experts.capacity=1 {LOSSES} {SIGMOIDS}"
CUTS = [
    (2, f"{EP2} train.micro_batch=6"),
    (1, "train.micro_batch=12"),
    (4, "parallel.expert=4 train.micro_batch=3"),
    (2, f"{TP2} train.micro_batch=8"),
    (2, f"{TP2} {APART} {EP2} {CUT} train.micro_batch=12"),
    (2, f"{PP2} train.micro_batch=6"),
    (4, f"{EP2} parallel.zero=3 train.micro_batch=6"),
    (4, f"{EP2} {PP2} parallel.schedule=zb-h1 parallel.zero=2 train.micro_batch=3"),
    (4, f"{CP2} parallel.expert=4 parallel.zero=1 train.micro_batch=6"),
]


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 1, 3, 4, 6],
        [6, 0, 5],
        *(
            pytest.param(
                [n, *(m for m in range(len(CUTS)) if m != n)], marks=pytest.mark.full
            )
            for n in (1, 4, 7, 8)
        ),
    ],
)
@pytest.mark.mpi(4, timeout=240)
def test_a_run_goes_on_with_other_shares_of_the_experts(comm, tmp_path, numbers):
    assert hops(comm, tmp_path, SAVED, CUTS, numbers) == {}


@pytest.mark.mpi(2)
def test_generation_says_the_same_on_any_ranks(comm, tmp_path, capsys):
    words = f"{SAVED} {EP2} {TP2} {APART} model.vocab=256"
    with layout_engine(make_recipe(2, *words.split()), comm) as engine:
        take_step(engine, make_batch(engine.recipe, 0))
        folder = save_engine(engine, comm.bcast(tmp_path))
    alone, options = comm.Split(comm.rank), {"tokens": 13, "temperature": 1.0}
    run_generation(folder, alone, "abc", **options)
    exact = capsys.readouterr().out
    alone.Free()
    run_generation(folder, comm, "abc", **options)
    together = capsys.readouterr().out
    assert exact.startswith("abc") and len(exact) > 8
    assert together == (exact if comm.rank == 0 else "")
