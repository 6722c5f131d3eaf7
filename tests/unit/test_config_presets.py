"""Presets are found by name, load, and have the sizes they are named after."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import mpipar
from mpipar.config import Recipe, find_recipe, preset_names, read_recipe, to_toml
from mpipar.errors import ConfigError

PRESETS = [
    "deepseek-16b", "gpt2-1.5b", "gpt2-124m", "llama-8b", "mixtral-8x7b", "small",
    "tiny", "tiny-llama", "tiny-mixtral",
]  # fmt: skip


@pytest.fixture(autouse=True)
def models_package(tmp_path, monkeypatch):
    """Make mpipar.models known where the project is not installed."""
    if find_spec("mpipar.models") is None:
        (tmp_path / "models").symlink_to(Path(mpipar.__file__).parents[1] / "models")
        monkeypatch.setattr(mpipar, "__path__", [*mpipar.__path__, str(tmp_path)])


def preset(name: str, ranks: int, *overrides: str) -> Recipe:
    path = find_recipe(name)
    return read_recipe(path.read_text(), overrides, path.parent, ranks)


def parameters(recipe: Recipe) -> int:
    """Weights of the model, counted by hand."""
    m = recipe.model
    kv_width = m.width // m.heads * m.kv_heads
    matrices = 2 * m.width * (m.width + kv_width)
    table = m.vocab * m.width
    if m.family == "llama":
        block, e = matrices + 2 * m.width, recipe.experts
        dense = m.layers if e.count == 0 else e.dense_blocks
        mixture = e.count * m.width + 3 * m.width * e.ffn * (e.count + e.shared)
        inner = dense * 3 * m.width * m.ffn + (m.layers - dense) * mixture
        return m.layers * block + inner + m.width + table * (1 if m.tied else 2)
    biases = 2 * m.width + 2 * kv_width + m.ffn + m.width
    block = matrices + 2 * m.width * m.ffn + biases + 4 * m.width
    return m.layers * block + 2 * m.width + table + m.context * m.width


def test_the_presets_are_known():
    assert set(PRESETS) <= set(preset_names())


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        *(("tiny", n, ()) for n in (1, 2, 4, 8)),
        *(("tiny-llama", n, ()) for n in (1, 2, 8)),
        *((name, 8, ("parallel.tensor=4",)) for name in ("tiny", "tiny-llama")),
        ("tiny", 4, ("parallel.tensor=2", "parallel.sequence=true")),
        *(("small", n, ()) for n in (1, 2, 4, 16)),
        ("small", 4, ("parallel.tensor=2", "parallel.sequence=true")),
        *((name, n, ()) for name in ("gpt2-124m", "gpt2-1.5b") for n in (1, 8, 256)),
        ("gpt2-124m", 48, ("parallel.tensor=12", "model.context=1020")),
        *(("llama-8b", n, ()) for n in (8, 64, 4096)),
        ("llama-8b", 512, ("parallel.tensor=32",)),
        *(("tiny-mixtral", n, ()) for n in (1, 2, 8)),
        *(("tiny-mixtral", n, (f"parallel.expert={n}",)) for n in (2, 4)),
        *(
            (name, n, ())
            for name in ("mixtral-8x7b", "deepseek-16b")
            for n in (8, 64, 512)
        ),
    ],
)
def test_a_preset_resolves_and_is_written_exactly(name, ranks, overrides):
    recipe = preset(name, ranks, *overrides)
    assert recipe.parallel.tensor * recipe.parallel.data == ranks
    assert read_recipe(to_toml(recipe), ranks=ranks) == recipe


@pytest.mark.parametrize(
    ("name", "ranks", "count"),
    [
        ("gpt2-124m", 1, 124_439_808),
        ("gpt2-1.5b", 1, 1_557_611_200),
        ("llama-8b", 8, 8_030_261_248),
        ("mixtral-8x7b", 8, 46_702_792_704),
        ("deepseek-16b", 8, 16_375_728_128),
    ],
)
def test_a_preset_has_the_size_of_its_model(name, ranks, count):
    assert parameters(preset(name, ranks)) == count


@pytest.mark.parametrize("name", ["tiny", "tiny.toml"])
def test_a_preset_is_found_by_name(name):
    assert find_recipe(name).read_text().startswith("# A GPT that learns")


def test_a_file_comes_before_a_preset_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert find_recipe("tiny").is_file()
    Path("tiny.toml").write_text("")
    assert find_recipe("tiny.toml") == Path("tiny.toml")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tny", ["is no file and no preset", "did you mean tiny", *PRESETS]),
        ("jobs/smal.toml", ['recipe "jobs/smal.toml"', "did you mean small?"]),
        ("jobs/tiny.toml", ["is no file", "did you mean tiny"]),
        (".", ["is a folder, not a recipe", *PRESETS]),
        ("zzzz", [f"preset; presets: {', '.join(PRESETS)}"]),
    ],
)
def test_an_unknown_recipe_lists_the_presets(name, parts):
    with pytest.raises(ConfigError) as caught:
        find_recipe(name)
    for part in parts:
        assert part in str(caught.value)
