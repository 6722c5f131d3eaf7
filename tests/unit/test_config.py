"""Recipes are read, refused with clear messages, and written back exactly."""

import pickle
import subprocess
import sys
from math import prod

import pytest
from hypothesis import given, settings
from pydantic import ValidationError
from recipe_cases import recipes

from mpipar.config import AXES, read_recipe, replace, resolve, to_toml
from mpipar.config.recipe import SECTIONS
from mpipar.errors import ConfigError

SHORT = "[model]\nlayers = 2\nwidth = 64\nheads = 4\ncontext = 64\n"


def refused(*overrides: str, text: str = SHORT, **options) -> list[str]:
    """The violations of a recipe that must be refused."""
    with pytest.raises(ConfigError) as caught:
        read_recipe(text, overrides, **options)
    assert caught.value.exit_code == 2
    return caught.value.violations


def test_four_sizes_are_a_whole_recipe():
    recipe = read_recipe(SHORT)
    assert (recipe.model.family, recipe.data.source) == ("gpt", "stdlib")
    assert recipe.parallel.axes == {"tp": 1, "cp": 1, "dp": 0, "pp": 1}
    assert recipe.parallel.order == AXES


def test_every_field_says_what_it_is():
    fields = [f for cls in SECTIONS.values() for f in cls.model_fields.values()]
    assert all(field.description for field in fields)


def test_a_recipe_is_frozen_hashable_and_picklable():
    recipe = read_recipe(SHORT)
    with pytest.raises(ValidationError):
        recipe.train.steps = 3
    assert hash(recipe) == hash(read_recipe(SHORT))
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_a_missing_field_says_what_it_is_and_what_passes():
    assert refused(text="") == [
        f"model.{name} is missing ({what}): a whole number from 1 to 2147483647"
        for name, what in [
            ("layers", "transformer blocks"),
            ("width", "width of the residual stream"),
            ("heads", "query heads"),
            ("context", "tokens in a sequence"),
        ]
    ]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        # Wrong types.
        ("model.tied='yes'", 'model.tied = "yes" must be true or false; try true'),
        ("model.tied=0", "model.tied = 0 must be true or false; try false"),
        ("model.tied=[]", "model.tied = [] must be true or false"),
        (
            "train.steps=2.5",
            "train.steps = 2.5 must be a whole number from 1 to 2147483647; try 2 or 3",
        ),
        (
            "train.steps=2.0",
            "train.steps = 2.0 must be a whole number from 1 to 2147483647; try 2",
        ),
        (
            "train.steps=true",
            "train.steps = true must be a whole number from 1 to 2147483647",
        ),
        (
            "train.steps='20'",
            'train.steps = "20" must be a whole number from 1 to 2147483647; try 20',
        ),
        ("optimizer.lr=fast", 'optimizer.lr = "fast" must be a number above 0'),
        ("optimizer.lr=true", "optimizer.lr = true must be a number above 0"),
        ("optimizer.lr='1e-3'", "must be a number above 0; try 0.001"),
        ("optimizer.lr=nan", "optimizer.lr = nan must be a number above 0"),
        ("optimizer.lr=inf", "optimizer.lr = inf must be a number above 0"),
        ("data.source=5", 'data.source = 5 must be text in quotes, not empty; try "5"'),
        ("data.source=", 'data.source = "" must be text in quotes, not empty'),
        ("model.width={a=1}", "model.width = {a = 1} must be a whole number"),
        # Out of range, with the nearest value that passes where there is one.
        (
            "model.layers=0",
            "model.layers = 0 must be a whole number from 1 to 2147483647; try 1",
        ),
        (
            "train.micro_batch=-3",
            "train.micro_batch = -3 must be a whole number from 0 to 2147483647; try 0",
        ),
        ("train.seed=" + "9" * 5000, "train.seed = "),
        ("train.seed=0x" + "f" * 5000, "train.seed = (int, too long to show) must be"),
        ("model.family=0x" + "f" * 5000, "model.family = (int, too long to show) must"),
        (
            "model.dropout=1.0",
            "model.dropout = 1.0 must be a number of at least 0 and below 1",
        ),
        (
            "data.validation=0.7",
            "data.validation = 0.7 must be a number from 0 to 0.5; try 0.5",
        ),
        ("train.clip=-1", "train.clip = -1 must be a number of at least 0; try 0"),
        ("optimizer.beta1=1", "optimizer.beta1 = 1 must be a number of at least 0"),
        ("optimizer.beta2=-0.1", "optimizer.beta2 = -0.1 must be a number of at least"),
        ("optimizer.min_lr=2", "optimizer.min_lr = 2 must be a number from 0 to 1"),
        ("log.timeout_s=0", "log.timeout_s = 0 must be a number above 0"),
        ("parallel.bucket_mb=0.0", "parallel.bucket_mb = 0.0 must be a number above 0"),
        ("parallel.context=0", "must be a whole number from 1 to 2147483647; try 1"),
        ("model.window=-1", "must be a whole number from 0 to 2147483647; try 0"),
        ("data.end_token=-2", "must be a whole number from -1 to 2147483647; try -1"),
        # One of a few words.
        (
            "model.family=gtp",
            'model.family = "gtp" must be "gpt" or "llama"; try "gpt"',
        ),
        (
            "train.precision=fp61",
            'train.precision = "fp61" must be "fp64", "fp32", "bf16" or "fp16"; '
            'try "fp64"',
        ),
        (
            "log.progress=line",
            'log.progress = "line" must be "auto", "bar", "lines" or "none"; '
            'try "lines"',
        ),
        (
            "parallel.context_method=rings",
            'parallel.context_method = "rings" must be "ring", "zigzag", "striped", '
            '"allgather", "ulysses" or "usp"; try "ring"',
        ),
        (
            "data.documents=separated",
            'data.documents = "separated" must be "joined" or "separate"; '
            'try "separate"',
        ),
        (
            'parallel.order=["dp", "tp", "dp"]',
            'parallel.order = ["dp", "tp", "dp"] must be a list of the axes "tp", '
            '"cp", "dp", "pp", each once; try ["dp", "tp", "cp", "pp"]',
        ),
        ("parallel.order=tp", 'try ["tp", "cp", "dp", "pp"]'),
        # Unknown keys, with the nearest known one.
        ("model.layer=2", "model.layer = 2 is not a known key; did you mean model.la"),
        ("model.Width=2", "model.Width = 2 is not a known key; did you mean model.wid"),
        ("model.steps=4", "model.steps = 4 is not a known key; did you mean train.st"),
        ("log.xyz=1", "log.xyz = 1 is not a known key; [log] has every, timeout_s, "),
        (
            "optimiser.lr=1",
            "[optimiser] is not a section of the recipe; did you mean [optimizer]?",
        ),
        ("qqq.lr=1", "[qqq] is not a section of the recipe; a recipe has [model], "),
    ],
)
def test_a_wrong_field_is_named_with_value_rule_and_what_passes(override, sentence):
    (violation,) = refused(override)
    assert sentence in violation
    assert len(violation) < 250


def test_a_path_that_is_no_unicode_text_is_refused():
    (violation,) = refused("data.source=caf\udce9")
    violation.encode()


def test_a_value_outside_any_section_names_its_section():
    (violation,) = refused(text="steps = 3\n" + SHORT)
    assert violation == "steps = 3 is outside its section; did you mean train.steps?"


def test_a_section_that_is_a_value_is_refused():
    (violation,) = refused("model.layers=3", text="model = 5")
    assert violation.startswith("model = 5 must be a section: write [model]")


def test_all_problems_of_all_kinds_come_in_one_message():
    with pytest.raises(ConfigError) as caught:
        read_recipe(
            SHORT + "kv_heads = 3\nlayer = 1\n[trian]\n[optimizer]\nwarmup = 300\n",
            ["model.layers=0", "train.precision=fp8", "parallel.tensor=8", "oops"],
            ranks=12,
        )
    message = str(caught.value)
    assert message.startswith("the recipe has 10 problems:\n  - ")
    for part in [
        'override "oops"',
        "[trian] is not a section",
        "model.layer = 1 is not a known key",
        "model.layers = 0 must",
        'train.precision = "fp8" must be "fp64", "fp32", "bf16" or "fp16"',
        "model.kv_heads = 3 must divide model.heads = 4; try 2 or 4",
        "optimizer.warmup = 300 must be at most train.steps = 200",
        "parallel.tensor = 8 must divide model.heads = 4; try 1",
        "parallel.tensor = 8 must divide model.kv_heads = 3 or be",
        "must equal the number of ranks, 12",
    ]:
        assert part in message


# Overrides and paths.


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("train.steps=7", "train", "steps", 7),
        (" train.steps = 7 # so few", "train", "steps", 7),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("model.family=llama", "model", "family", "llama"),
        ("model.family='llama'", "model", "family", "llama"),
        ("model.tied=false", "model", "tied", False),
        ("data.source=a=b.txt", "data", "source", "a=b.txt"),
        ("data.source=1\ntrain.steps=9", "data", "source", "1\ntrain.steps=9"),
        ('parallel.order=["pp","dp","cp","tp"]', "parallel", "order", AXES[::-1]),
    ],
)
def test_an_override_is_toml_or_else_text(override, section, field, value):
    recipe = read_recipe(SHORT, [override])
    assert getattr(getattr(recipe, section), field) == value


def test_the_last_override_wins_over_the_text():
    text = SHORT + "[train]\nsteps = 5\n"
    assert read_recipe(text, ["train.steps=6", "train.steps=7"]).train.steps == 7


@pytest.mark.parametrize("override", ["", "tensor", "tensor=2", "a.b.c=1", ".a=1", "="])
def test_a_malformed_override_is_one_violation_among_the_others(override):
    malformed, other = refused(override, "train.steps=0")
    assert malformed == (
        f'override "{override}" must have the form section.field=value; '
        "try parallel.tensor=2"
    )
    assert other.startswith("train.steps = 0")


def test_relative_paths_start_at_the_recipe_or_at_the_working_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = SHORT + '[data]\nsource = "books"\ntokenizer = "t/tokenizer.json"\n'
    recipe = read_recipe(text, ["data.source=./new"], base_dir="/recipes")
    assert recipe.data.source == str(tmp_path / "new")
    assert recipe.data.tokenizer == "/recipes/t/tokenizer.json"
    # The same recipe read from the run's folder means the same files.
    assert read_recipe(to_toml(recipe), base_dir="/elsewhere") == recipe


def test_words_and_absolute_paths_stay_as_they_are():
    recipe = read_recipe(SHORT + '[data]\nsource = "/a/b"\n', base_dir="/recipes")
    assert (recipe.data.source, recipe.data.tokenizer) == ("/a/b", "bytes")
    assert read_recipe(SHORT, base_dir="/recipes").data.source == "stdlib"


# TOML.


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[model\nx = 1", "(at line 1, column 7)"),
        ("[model]\nx =", "(at line 2, column 4)"),
        ("[model]\nx = [1,\n", "(at line 3, column 1)"),
        ("[model]\nx = 1\nx = 2", "(at line 3, column 6)"),
        (f"x = {'9' * 5000}", ""),
        (f"x = {'[' * 5000}", "nested too deeply"),
    ],
)
def test_a_syntax_error_has_its_line_and_column(text, place):
    syntax, override = refused("bad", text=text)
    assert syntax.startswith("not TOML: ")
    assert syntax.endswith(place)
    assert override.startswith('override "bad"')


def test_the_written_recipe_holds_every_field():
    text = to_toml(resolve(read_recipe(SHORT), 4))
    assert "ffn = 256\n" in text and "data = 4\n" in text
    assert 'order = ["tp", "cp", "dp", "pp"]\n' in text
    assert text.count(" = ") == sum(len(s.model_fields) for s in SECTIONS.values())


@settings(max_examples=60, deadline=None)
@given(recipes())
def test_any_valid_recipe_survives_writing_and_reading(recipe):
    assert read_recipe(to_toml(recipe)) == recipe
    ranks = prod(recipe.parallel.axes.values())
    assert read_recipe(to_toml(recipe), ranks=ranks) == resolve(recipe, ranks) == recipe


# Changes in code, and start-up.


def test_replace_checks_the_new_values():
    recipe = read_recipe(SHORT)
    changed = replace(recipe, {"train.precision": "fp64", "model.vocab": 101})
    assert (changed.train.precision, changed.model.vocab) == ("fp64", 101)
    with pytest.raises(ConfigError) as caught:
        replace(recipe, {"train.precison": "fp64", "model.layers": 0})
    assert len(caught.value.violations) == 2


def test_importing_config_loads_no_heavy_package():
    code = "import sys, mpipar.config as c; c.preset_names(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"numpy", "mpi4py", "h5py", "cupy", "rich", "mpipar.models"}
