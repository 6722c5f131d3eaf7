"""Rules between fields and ranks, and the values that follow from them."""

import pytest

from mpipar.config import read_recipe, replace, resolve
from mpipar.errors import ConfigError

SHORT = "[model]\nlayers = 2\nwidth = 64\nheads = 4\ncontext = 64\n"


def recipe_of(*overrides: str):
    return read_recipe(SHORT, overrides)


def broken(ranks: int, *overrides: str) -> list[str]:
    """The rules that a recipe breaks on a number of ranks."""
    with pytest.raises(ConfigError) as caught:
        read_recipe(SHORT, overrides, ranks=ranks)
    return caught.value.violations


# Values that are derived.


def test_zeros_are_filled_from_the_ranks_and_the_other_values():
    recipe = resolve(recipe_of("parallel.tensor=2"), 8)
    assert (recipe.model.kv_heads, recipe.model.ffn, recipe.model.vocab) == (
        4,
        256,
        256,
    )
    assert (recipe.parallel.data, recipe.train.micro_batch) == (4, 2)
    assert recipe.parallel.axes == {"tp": 2, "cp": 1, "dp": 4, "pp": 1}
    assert recipe.accumulation == 1


@pytest.mark.parametrize(
    ("width", "ffn"), [(48, 128), (64, 192), (96, 256), (128, 352), (4096, 10944)]
)
def test_the_inner_width_of_llama_is_8_thirds_in_steps_of_32(width, ffn):
    recipe = recipe_of("model.family=llama", f"model.width={width}")
    assert resolve(recipe, 1).model.ffn == ffn


def test_accumulation_counts_the_micro_batches_of_a_data_rank():
    recipe = resolve(recipe_of("train.global_batch=24", "train.micro_batch=3"), 4)
    assert recipe.accumulation == 2


def test_accumulation_of_an_unresolved_recipe_is_refused():
    with pytest.raises(ValueError, match="resolve"):
        _ = recipe_of().accumulation


def test_a_resolved_recipe_resolves_to_itself():
    recipe = resolve(recipe_of("parallel.tensor=2"), 4)
    assert resolve(recipe, 4) == recipe


def test_a_vocabulary_that_only_the_tokenizer_knows_stays_open():
    recipe = resolve(recipe_of("data.tokenizer=/t.json", "parallel.tensor=4"), 4)
    assert recipe.model.vocab == 0
    with pytest.raises(ConfigError, match="at most model.vocab = 3"):
        resolve(replace(recipe, {"model.vocab": 3}), 4)


def test_reading_with_ranks_also_resolves():
    assert read_recipe(SHORT, ranks=2) == resolve(read_recipe(SHORT), 2)


# Layouts that are legal.


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["model.kv_heads=1", "parallel.tensor=2"]),
        (4, ["model.kv_heads=2", "parallel.tensor=4"]),
        (4, ["model.kv_heads=2", "parallel.tensor=2", "parallel.data=2"]),
        (2, ["model.vocab=257", "parallel.tensor=2"]),
        (2, ["model.vocab=101", "data.source=/t.npy", "parallel.tensor=2"]),
        (1, ["parallel.sequence=true", "model.context=7"]),
        (2, ["parallel.tensor=2", "model.context=7"]),
        (8, ["train.global_batch=8"]),
        (1, ["train.steps=5", "optimizer.warmup=5"]),
        (1, ["model.width=60", "model.heads=4"]),
        (4, ['parallel.order=["dp","tp","cp","pp"]', "parallel.tensor=2"]),
        (2, ["parallel.context=2", "model.context=7"]),
        (8, ["parallel.context=4", "parallel.tensor=2"]),
    ],
)
def test_a_legal_layout_resolves(ranks, overrides):
    """A30: shared key/value heads and uneven vocabularies are legal."""
    axes = resolve(recipe_of(*overrides), ranks).parallel.axes
    assert axes["tp"] * axes["cp"] * axes["dp"] == ranks


def test_the_vocabulary_is_never_padded():
    """A30."""
    recipe = recipe_of("model.vocab=101", "data.source=/t.npy", "parallel.tensor=2")
    assert resolve(recipe, 2).model.vocab == 101


# Layouts that are refused.

# Six heads, and sizes that every small number of ranks divides.
H6 = ("model.heads=6", "model.width=96", "model.ffn=96", "train.global_batch=36")


@pytest.mark.parametrize(
    ("ranks", "overrides", "sentence"),
    [
        (
            12,
            ["model.heads=32", "model.ffn=96", "parallel.tensor=3"],
            "parallel.tensor = 3 must divide model.heads = 32; try 2 or 4",
        ),
        (
            12,
            [*H6, "parallel.tensor=4"],
            "parallel.tensor = 4 must divide model.heads = 6; try 3 or 6",
        ),
        (
            2,
            [*H6, "model.kv_heads=3", "parallel.tensor=2"],
            "parallel.tensor = 2 must divide model.kv_heads = 3 or be a multiple of "
            "it; try 1",
        ),
        (
            6,
            [*H6, "model.kv_heads=3", "parallel.tensor=2"],
            "parallel.tensor = 2 must divide model.kv_heads = 3 or be a multiple of "
            "it; try 1 or 3",
        ),
        (
            2,
            ["model.ffn=65", "parallel.tensor=2"],
            "parallel.tensor = 2 must divide model.ffn = 65; try parallel.tensor = 1, "
            "or model.ffn = 64 or 66",
        ),
        (
            4,
            ["model.vocab=3", "data.source=/t.npy", "parallel.tensor=4"],
            "parallel.tensor = 4 must be at most model.vocab = 3; try 2",
        ),
        (
            2,
            ["model.context=7", "parallel.sequence=true", "parallel.tensor=2"],
            "parallel.tensor = 2 must divide model.context = 7 when parallel.sequence "
            "= true; try parallel.tensor = 1, or model.context = 6 or 8, or "
            "parallel.sequence = false",
        ),
    ],
)
def test_a_tensor_size_that_does_not_cut_the_model_is_refused(
    ranks, overrides, sentence
):
    """A30: refused before any array exists, with sizes that pass all rules."""
    assert broken(ranks, *overrides) == [sentence]


@pytest.mark.parametrize(
    ("ranks", "overrides", "sentence"),
    [
        (
            6,
            ["parallel.tensor=4"],
            "the product parallel.tensor = 4 times parallel.data must equal the number "
            "of ranks, 6, but 4 does not divide 6; try parallel.tensor = 2, or ranks = "
            "4 or 8",
        ),
        (
            2,
            ["parallel.tensor=4"],
            "the product parallel.tensor = 4 times parallel.data must equal the number "
            "of ranks, 2, but 4 does not divide 2; try parallel.tensor = 2, or ranks = "
            "4",
        ),
        (
            6,
            ["parallel.tensor=2", "parallel.data=2"],
            "the product parallel.tensor * parallel.data = 2 * 2 = 4 must equal the "
            "number of ranks, 6; try parallel.data = 3, or ranks = 4",
        ),
        (
            8,
            ["parallel.tensor=2", "parallel.data=2"],
            "the product parallel.tensor * parallel.data = 2 * 2 = 4 must equal the "
            "number of ranks, 8; try parallel.tensor = 4, or parallel.data = 4, or "
            "ranks = 4",
        ),
        (
            3,
            ["parallel.tensor=2", "parallel.data=2"],
            "the product parallel.tensor * parallel.data = 2 * 2 = 4 must equal the "
            "number of ranks, 3; try ranks = 4",
        ),
        (
            6,
            ["parallel.context=4"],
            "the product parallel.context = 4 times parallel.data must equal the "
            "number of ranks, 6, but 4 does not divide 6; try parallel.context = 3 or "
            "6, or ranks = 4 or 8",
        ),
        (
            6,
            ["parallel.tensor=2", "parallel.context=2"],
            "the product parallel.tensor = 2 times parallel.context = 2 times "
            "parallel.data must equal the number of ranks, 6, but 2 * 2 does not "
            "divide 6; try parallel.tensor = 1, or parallel.context = 1 or 3, or "
            "ranks = 4 or 8",
        ),
        (
            12,
            ["parallel.context=3", "parallel.tensor=2", "parallel.data=4"],
            "the product parallel.tensor * parallel.context * parallel.data = 2 * 3 * "
            "4 = 24 must equal the number of ranks, 12; try parallel.tensor = 1, or "
            "parallel.data = 2, or ranks = 24",
        ),
    ],
)
def test_a_world_of_another_size_is_refused_with_the_product(
    ranks, overrides, sentence
):
    """A32: no rank idles quietly."""
    assert broken(ranks, *overrides) == [sentence]


@pytest.mark.parametrize(
    ("ranks", "overrides", "sentence"),
    [
        (
            4,
            ["train.global_batch=6"],
            "train.global_batch = 6 must be a multiple of parallel.data = 4 (derived); "
            "try 4 or 8",
        ),
        (
            4,
            ["train.global_batch=3", "parallel.data=4"],
            "train.global_batch = 3 must be a multiple of parallel.data = 4; try 4",
        ),
        (
            2,
            ["train.global_batch=12", "train.micro_batch=4"],
            "train.global_batch = 12 must be a multiple of parallel.data * "
            "train.micro_batch = 2 * 4 = 8; try train.global_batch = 8 or 16, or "
            "train.micro_batch = 3 or 6",
        ),
        (
            2,
            ["train.global_batch=5", "train.micro_batch=2"],
            "train.global_batch = 5 must be a multiple of parallel.data * "
            "train.micro_batch = 2 * 2 = 4; try train.global_batch = 4 or 8",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(ranks, overrides, sentence):
    """A31: every rank takes the same number of micro-batches of the same size."""
    assert broken(ranks, *overrides) == [sentence]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["model.width=65"],
            "model.width = 65 must be a multiple of model.heads = 4; try 64 or 68",
        ),
        (
            ["model.width=65", "model.family=llama"],
            "model.width = 65 must be a multiple of model.heads = 4; try 64 or 72",
        ),
        (
            ["model.width=68", "model.family=llama"],
            "the width of a head, model.width / model.heads = 68 / 4 = 17, must be "
            'even for the RoPE of model.family = "llama"; try model.width = 64 or 72',
        ),
        (
            ["model.kv_heads=3"],
            "model.kv_heads = 3 must divide model.heads = 4; try 2 or 4",
        ),
        (
            ["model.kv_heads=8"],
            "model.kv_heads = 8 must divide model.heads = 4; try 4",
        ),
        (
            ["model.family=llama", "model.activation=gelu"],
            'model.activation = "gelu" is for model.family = "gpt"; model.family = '
            '"llama" always uses SwiGLU; remove it',
        ),
        (
            ["model.rope_theta=500"],
            'model.rope_theta = 500 is for model.family = "llama"; model.family = '
            '"gpt" learns its positions; remove it',
        ),
        (
            ["model.vocab=101"],
            "model.vocab = 101 must be at least 256, the tokens of data.tokenizer = "
            '"bytes"; try 256, or 0 for the tokenizer\'s size',
        ),
        (
            ["optimizer.warmup=300"],
            "optimizer.warmup = 300 must be at most train.steps = 200; try "
            "optimizer.warmup = 200, or train.steps = 300",
        ),
        (
            ["train.eval_every=5", "data.validation=0"],
            "train.eval_every = 5 needs held-out tokens, but data.validation = 0; try "
            "data.validation = 0.05, or train.eval_every = 0",
        ),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused_without_ranks(
    overrides, sentence
):
    with pytest.raises(ConfigError) as caught:
        recipe_of(*overrides)
    assert caught.value.violations == [sentence]


def test_resolve_lists_every_broken_rule():
    changes = {"optimizer.warmup": 201, "model.width": 66, "parallel.data": 5}
    recipe = replace(recipe_of(), changes)
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, 3)
    keys = [violation.split(" = ")[0] for violation in caught.value.violations]
    assert keys == [
        "model.width",
        "optimizer.warmup",
        "the product parallel.tensor * parallel.data",
        "train.global_batch",
    ]


def test_a_wrong_field_hides_only_the_rules_that_need_it():
    violations = broken(4, "model.heads=-4", "model.ffn=65", "parallel.tensor=2")
    assert [v.split(" must ")[0] for v in violations] == [
        "model.heads = -4",
        "parallel.tensor = 2",
    ]


def test_huge_sizes_are_judged_at_once():
    sizes = ["parallel.tensor=2147483646", "model.heads=2147483647"]
    assert any("try 1" in v for v in broken(1, *sizes, "model.width=2147483647"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["parallel.schedule=zb_h1"], 'must be "naive", "gpipe"'),
        (["parallel.schedule=zb_h1"], 'or a file; try "zb-h1"'),
        (["parallel.schedule=zb-v", "parallel.chunks=3"], "chunks = 3 must be 2 for"),
        (["parallel.schedule=interleaved", "parallel.chunks=1"], "must be at least 2"),
        (
            ["parallel.schedule=interleaved", "parallel.chunks=99"],
            "at most model.layers",
        ),
        (["parallel.partition=2"], "must have 2 numbers"),
        (["parallel.partition=1,2"], "add up to model.layers = 4, not to 3"),
        (["parallel.partition=2,x"], 'must be "even", "measured" or "N,N,..."'),
        (["parallel.partition=\u00b2,2"], 'must be "even", "measured" or "N,N,..."'),
        (["parallel.partition=" + "9" * 5000], 'must be "even"'),
        (["parallel.pipeline=3"], "does not divide 2"),
        (["train.loss_scale=0.5"], "train.loss_scale = 0.5 must be"),
    ],
)
def test_wrong_pipelines_are_named(changes, message):
    base = ["parallel.pipeline=2", "model.layers=4"]
    assert any(message in text for text in broken(2, *base, *changes))


def test_a_partition_may_be_a_list():
    for words in ("1,3", "[1, 3]", '"1,3"'):
        changes = "parallel.pipeline=2", "model.layers=4", f"parallel.partition={words}"
        recipe = resolve(recipe_of(*changes), 2)
        assert recipe.parallel.partition == "1,3"


def test_cudnn_has_its_conditions():
    words = ["train.attention=cudnn", "model.dropout=0.1"]
    assert broken(1, *words, "train.precision=fp32") == [
        'train.attention = "cudnn" works in 16 bits, not train.precision = "fp32"; try '
        'train.precision = "bf16" or "fp16", or train.attention = "auto" or "flash"',
        'train.attention = "cudnn" drops nothing: model.dropout = 0.1; try '
        'model.dropout = 0.0, or train.attention = "auto" or "flash"',
    ]
    assert broken(1, "train.attention=flash", "train.device=cpu") == [
        'train.attention = "flash" is for GPUs, not train.device = "cpu"; try "auto"'
    ]


def test_a_transport_is_for_gpus():
    words = "parallel.transport=nccl", "train.device=cpu"
    assert broken(2, *words) == [
        'parallel.transport = "nccl" is for GPUs, not train.device = "cpu"; try "auto"'
    ]
    assert read_recipe(SHORT, words[:1], ranks=2).parallel.transport == "nccl"
