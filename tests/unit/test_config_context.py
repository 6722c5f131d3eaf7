"""Rules of recipes whose sequences several ranks share."""

import pytest

from mpipar.config import head_ranks, read_recipe
from mpipar.config.kinds import METHODS
from mpipar.errors import ConfigError

SHORT = "[model]\nlayers = 2\nwidth = 64\nheads = 4\ncontext = 64\n"
# Six heads, and sizes that every small number of ranks divides.
H6 = ("model.heads=6", "model.width=96", "model.ffn=96", "train.global_batch=36")
USP = ("parallel.context_method=usp",)
ULYSSES = ("parallel.context_method=ulysses",)
HEADS_4 = (
    "must divide the 4 query heads of a tensor rank, and divide its 4 key/value heads "
    "or be a multiple of them"
)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (4, ["model.kv_heads=1", "parallel.context=4", *ULYSSES]),
        (4, ["model.kv_heads=2", "parallel.context=4", *ULYSSES]),
        (6, ["parallel.context=6", *ULYSSES, *H6, "model.kv_heads=3"]),
        (8, ["parallel.context=8", *USP]),
        (8, ["parallel.context=8", *USP, "parallel.ulysses=2"]),
        (4, ["parallel.context=4", *USP, "parallel.ulysses=1"]),
        (8, ["parallel.context=4", *USP, "parallel.ulysses=2", "parallel.tensor=2"]),
        *(
            (4, [f"parallel.context_method={method}", "parallel.context=4"])
            for method in METHODS
        ),
    ],
)
def test_heads_and_sequences_that_context_ranks_can_share(ranks, overrides):
    recipe = read_recipe(SHORT, overrides, ranks=ranks)
    assert recipe.parallel.context * recipe.parallel.tensor == ranks


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ulysses"}))
@pytest.mark.parametrize("context", [7, 61])
def test_any_length_can_be_cut(method, context):
    """What is missing is added when it is cut."""
    words = ["parallel.context=3", f"parallel.context_method={method}"]
    words += [f"model.context={context}", "train.global_batch=3"]
    assert read_recipe(SHORT, words, ranks=3).model.context == context


@pytest.mark.parametrize(
    ("ranks", "overrides", "sentence"),
    [
        (
            3,
            ["parallel.context=3", *ULYSSES, "train.global_batch=3"],
            f"parallel.context = 3 {HEADS_4}; try 2 or 4",
        ),
        (8, ["parallel.context=8", *ULYSSES], f"parallel.context = 8 {HEADS_4}; try 4"),
        (
            8,
            ["parallel.context=4", "parallel.tensor=2", *ULYSSES],
            "parallel.context = 4 must divide the 2 query heads of a tensor rank, and "
            "divide its 2 key/value heads or be a multiple of them; try 2",
        ),
        (
            2,
            ["parallel.context=2", *ULYSSES, *H6, "model.kv_heads=3"],
            "parallel.context = 2 must divide the 6 query heads of a tensor rank, and "
            "divide its 3 key/value heads or be a multiple of them; try 1 or 3",
        ),
        (
            8,
            ["parallel.context=8", *USP, "parallel.ulysses=8"],
            f"parallel.ulysses = 8 {HEADS_4}; try 4",
        ),
        (
            6,
            ["parallel.context=6", *USP, "parallel.ulysses=4", "train.global_batch=6"],
            "parallel.ulysses = 4 must divide parallel.context = 6; try 3 or 6",
        ),
        (
            4,
            ["parallel.context=4", "parallel.ulysses=2"],
            'parallel.ulysses = 2 is for parallel.context_method = "usp"; try 0',
        ),
    ],
)
def test_heads_that_context_ranks_cannot_exchange_are_refused(
    ranks, overrides, sentence
):
    with pytest.raises(ConfigError) as caught:
        read_recipe(SHORT, overrides, ranks=ranks)
    assert caught.value.violations == [sentence]


def test_usp_exchanges_heads_among_as_many_ranks_as_can():
    for ranks, heads, kv_heads, found in (
        (8, 4, 4, 4), (8, 4, 2, 4), (8, 4, 1, 4), (6, 4, 4, 2), (6, 12, 3, 6),
        (6, 12, 4, 2), (3, 4, 4, 1), (7, 8, 8, 1),
    ):  # fmt: skip
        assert head_ranks("usp", ranks, 0, heads, kv_heads) == found
        assert head_ranks("usp", ranks, 1, heads, kv_heads) == 1
        assert head_ranks("ulysses", ranks, 0, heads, kv_heads) == ranks
        assert head_ranks("zigzag", ranks, 0, heads, kv_heads) == 1
