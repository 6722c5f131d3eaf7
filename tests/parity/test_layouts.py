"""Every layout gives the serial loss, gradients, gradient norm and weights."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest
from parity.build import FP32, FP64, Errors, compare, make_recipe

FAMILIES = ("gpt", "gpt-erf", "llama")
KV_HEADS = (4, 2, 1)
MICRO_BATCHES = (1, 2, 3)
# (tp, sequence, dp) on up to 8 ranks
LAYOUTS = [
    (tp, sequence, dp)
    for tp, dp in product((1, 2, 4), (1, 2, 4))
    for sequence in ((False, True) if tp > 1 else (False,))
    if tp * dp <= 8
]
Layout = tuple[int, bool, int]
Model = tuple[str, int, bool, float, int]


def standard_models(place: int) -> list[Model]:
    """Three models for the layout at this place of the list.

    Latin squares: over all layouts every pair of values of any two factors occurs.
    """
    return [
        (
            FAMILIES[row],
            KV_HEADS[(row + place) % 3],
            (row + place) % 2 == 0,
            (0.0, 0.1)[(row + place // 2) % 2],
            MICRO_BATCHES[(row + 2 * place) % 3],
        )
        for row in range(3)
    ]


STANDARD = [
    (layout, model)
    for place, layout in enumerate(LAYOUTS)
    for model in standard_models(place)
]


def changes(layout: Layout, model: Model) -> list[str]:
    (tp, sequence, dp), (family, kv, tied, dropout, micro_batches) = layout, model
    family, _, erf = family.partition("-")
    words = [
        f"parallel.tensor={tp}",
        f"parallel.sequence={str(sequence).lower()}",
        f"model.family={family}",
        f"model.kv_heads={kv}",
        f"model.tied={str(tied).lower()}",
        f"model.dropout={dropout}",
        f"train.micro_batch={24 // dp // micro_batches}",
    ]
    return words + ["model.activation=gelu"] * bool(erf)


def check(comm, layout: Layout, model: Model, *more: str) -> Errors:
    return compare(make_recipe(comm.size, *changes(layout, model), *more), comm)


def name(layout: Layout, model: Sequence) -> str:
    tp, sequence, dp = layout
    words = [f"tp{tp}" + "s" * sequence, f"dp{dp}", model[0], f"kv{model[1]}"]
    if len(model) > 2:
        words += ["tied" if model[2] else "untied", f"drop{model[3]}", f"m{model[4]}"]
    return "-".join(words)


def on_ranks(
    cases: Iterable[tuple[Layout, Sequence]], *marks: pytest.MarkDecorator
) -> pytest.MarkDecorator:
    """Parameters layout and model, each run on as many ranks as the layout has."""
    params = []
    for layout, model in cases:
        ranks = pytest.mark.mpi(layout[0] * layout[2], timeout=240)
        label = name(layout, model)
        params.append(pytest.param(layout, model, marks=[ranks, *marks], id=label))
    return pytest.mark.parametrize(("layout", "model"), params)


@on_ranks(STANDARD)
def test_a_layout_computes_what_one_rank_computes(comm, layout, model):
    assert check(comm, layout, model).above(FP64) == {}


@on_ranks(STANDARD[::3])
def test_a_layout_agrees_in_fp32(comm, layout, model):
    assert check(comm, layout, model, "train.precision=fp32").above(FP32) == {}


# What a combination has besides: every value with every other one, by Latin squares
RESTS = list(product((True, False), (0.0, 0.1), MICRO_BATCHES))
COMBINATIONS = list(product(LAYOUTS, product(FAMILIES, KV_HEADS)))


def check_rests(comm, layout: Layout, model: tuple[str, int], *, some: bool) -> None:
    """A quarter of the combinations of all other values, or the other ones."""
    place = LAYOUTS.index(layout) + FAMILIES.index(model[0]) + KV_HEADS.index(model[1])
    for number, rest in enumerate(RESTS):
        if (number % 4 == place % 4) is some:
            whole = (*model, *rest)
            assert check(comm, layout, whole).above(FP64) == {}, name(layout, whole)


@on_ranks(COMBINATIONS, pytest.mark.full)
def test_every_combination_agrees(comm, layout, model):
    """A30: heads of keys and values held by several ranks, a vocabulary of 101."""
    check_rests(comm, layout, model, some=True)


@on_ranks(COMBINATIONS, pytest.mark.exhaustive)
def test_all_that_a_combination_may_have_agrees(comm, layout, model):
    check_rests(comm, layout, model, some=False)


@on_ranks(STANDARD, pytest.mark.full)
def test_a_deeper_model_agrees(comm, layout, model):
    assert check(comm, layout, model, "model.layers=4").above(FP64) == {}
    more = ("model.layers=4", "train.precision=fp32")
    assert check(comm, layout, model, *more).above(FP32) == {}


def test_the_standard_tier_covers_every_pair():
    cases = [(layout, *model) for layout, model in STANDARD]
    factors = (LAYOUTS, FAMILIES, KV_HEADS, (True, False), (0.0, 0.1), MICRO_BATCHES)
    for a, b in combinations(range(len(factors)), 2):
        met = {(case[a], case[b]) for case in cases}
        assert met == set(product(factors[a], factors[b]))
