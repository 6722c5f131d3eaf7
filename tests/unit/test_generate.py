"""Generation: what is drawn, in which order, and how its text is shown."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.config import read_recipe
from mpipar.data import Tokenizer, load_tokenizer
from mpipar.errors import ConfigError, DataError
from mpipar.generate.run import _check, _encode, _Printer, generate
from mpipar.generate.sample import draw
from mpipar.grid import serial_grid
from mpipar.layers.model import Model
from mpipar.models import build_model
from mpipar.ops import Ops, make_ops
from mpipar.zero.flat import FlatState

VOCAB, CONTEXT = 257, 24
TEXT = """
[model]
family = "{family}"
layers = 2
width = 32
heads = 4
kv_heads = {kv_heads}
context = 24
vocab = 257
[train]
steps = 1
global_batch = 1
precision = "{precision}"
"""


def lively_model(
    family: str, precision: str, kv_heads: int, words: str = ""
) -> tuple[Model, Ops]:
    """A model whose weights are large enough to make different tokens likely.

    words   what else is in its recipe
    """
    text = TEXT.format(family=family, precision=precision, kv_heads=kv_heads)
    recipe = read_recipe(text, words.split(), ranks=1)
    ops = make_ops("cpu", precision)
    model = build_model(
        recipe.model,
        ops=ops,
        tp=serial_grid().tp,
        sequence=False,
        experts=recipe.experts,
    )
    flat = FlatState(model.groups().parameters, ops)
    flat.initialize(7)
    flat.data *= 12
    return model, ops


def continued(
    model: Model, ops: Ops, ids: Sequence[int], tokens: int, **draws: float
) -> list[int]:
    options = {"temperature": 0.0, "top_k": 0, "seed": 0} | draws
    stream = generate(model, ops, np.array(ids), CONTEXT, tokens=tokens, **options)
    return list(stream)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(
    ("family", "kv_heads", "words"),
    [
        ("gpt", 4, ""),
        ("gpt", 2, ""),
        ("llama", 2, ""),
        ("llama", 1, ""),
        ("llama", 4, "experts.count=4"),
        ("gpt", 4, "experts.count=4 experts.capacity=0.5 experts.balance=0.1"),
        ("llama", 4, "experts.count=4 experts.router=sigmoid experts.bias_rate=0.1"),
    ],
)
def test_the_cache_changes_no_token(
    family: str, kv_heads: int, words: str, precision: str
) -> None:
    model, ops = lively_model(family, precision, kv_heads, words)
    prompt = [5, 99, 3]
    tokens = continued(model, ops, prompt, 16)
    assert len(set(tokens)) > 3, "a model that repeats itself proves nothing"
    # Without a cache: every token from the whole prefix, in one pass.
    prefix = list(prompt)
    for token in tokens:
        assert continued(model, ops, prefix, 1) == [token]
        prefix.append(token)


@pytest.mark.parametrize(
    ("start", "asked", "drawn"),
    [(3, 5, 5), (3, 0, 0), (3, 21, 21), (3, 22, 21), (23, 9, 1), (24, 9, 0)],
)
def test_generation_ends_where_the_context_is_full(
    start: int, asked: int, drawn: int
) -> None:
    model, ops = lively_model("gpt", "fp64", 4)
    assert len(continued(model, ops, range(start), asked)) == drawn


def test_a_draw_depends_on_seed_and_place_alone() -> None:
    model, ops = lively_model("llama", "fp64", 2)
    hot = {"temperature": 1.5}
    first = continued(model, ops, [1, 2], 12, **hot, seed=3)
    assert continued(model, ops, [1, 2], 12, **hot, seed=3) == first
    assert continued(model, ops, [1, 2], 12, **hot, seed=4) != first
    # The same text reached in two goes.
    begun = [1, 2, *first[:5]]
    assert continued(model, ops, begun, 7, **hot, seed=3) == first[5:]


def drawn(logits: Sequence[float], **options: float) -> int:
    settings = {"temperature": 1.0, "top_k": 0, "seed": 0, "position": 0} | options
    return draw(np.array(logits), **settings)


@pytest.mark.parametrize("top_k", [0, 1, 4, 5000])
def test_temperature_zero_takes_the_lowest_of_the_likeliest(top_k: int) -> None:
    assert drawn([1.0, 7.0, 7.0, -2.0], temperature=0.0, top_k=top_k) == 1
    assert drawn([3.0, 3.0, 3.0, 3.0], temperature=0.0, top_k=top_k) == 0


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
@pytest.mark.parametrize("top_k", [0, 1, 2, 4, 5000])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float, top_k: int) -> None:
    for position in range(20):
        options = {"temperature": temperature, "top_k": top_k, "position": position}
        assert drawn([1.0, 6.9, 7.0, -900.0], **options) == 2


def test_equals_share_a_tiny_temperature() -> None:
    found = {drawn([7, 1, 7], temperature=1e-6, position=p) for p in range(40)}
    assert found == {0, 2}


@pytest.mark.parametrize("top_k", [3, 31, 5000])
def test_top_k_keeps_the_k_likeliest(top_k: int) -> None:
    logits = np.random.default_rng(0).normal(size=31) * 0.01
    kept = set(np.argsort(-logits)[:top_k].tolist())
    found = {drawn(logits, top_k=top_k, position=p) for p in range(1000)}
    assert found <= kept
    assert len(found) == min(top_k, 31)


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    found = {drawn([2, 2, 2, 2, 9], top_k=3, temperature=9.0, position=p)
             for p in range(400)}  # fmt: skip
    assert found == {0, 1, 4}


def test_draws_follow_the_softmax() -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    logits = 2 * np.log(shares)
    draws = [drawn(logits, temperature=2.0, position=p) for p in range(4000)]
    found = np.bincount(draws, minlength=4) / len(draws)
    # Five standard deviations of a share of 4000 draws.
    assert np.abs(found - shares).max() < 5 * np.sqrt(0.25 / len(draws))


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9),
    st.floats(0, 1e30),
    st.integers(0, 12),
    st.integers(0, 2**40),
)
def test_a_draw_is_always_a_token(
    logits: list[float], temperature: float, top_k: int, position: int
) -> None:
    values = np.array(logits, np.float32)
    token = draw(
        values, temperature=temperature, top_k=top_k, seed=1, position=position
    )
    assert 0 <= token < values.size


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_a_temperature_that_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="--temperature"):
        _check(1, wrong, 5)


def test_every_negative_setting_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        _check(-1, -0.5, -7)
    assert len(caught.value.violations) == 3
    assert caught.value.agreed
    _check(0, 0.0, 0)


def test_a_prompt_must_fit_the_context() -> None:
    tokenizer, world = load_tokenizer("bytes"), serial_grid().world
    model = SimpleNamespace(context=4, vocab=150)
    assert _encode("abcd", tokenizer, model, world).tolist() == [97, 98, 99, 100]
    with pytest.raises(ConfigError, match="5 tokens.*1 to 4"):
        _encode("abcde", tokenizer, model, world)
    # Nothing is said: the end of the document before it is.
    assert _encode("", tokenizer, model, world).tolist() == [0]
    with pytest.raises(DataError, match="195.*150"):
        _encode("é", tokenizer, model, world)


def start(tokenizer: Tokenizer, prompt: str, *, speaks: bool = True) -> _Printer:
    return _Printer(tokenizer, prompt, tokenizer.encode(prompt), speaks=speaks)


def shown(capsys: pytest.CaptureFixture, data: bytes, reason: str | None = None) -> str:
    printer = start(load_tokenizer("bytes"), "> ")
    for token in data:
        printer.add(token)
    printer.close(reason)
    return capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "plain", "naïve", "5 €", "🙂🙃", "ab\ufffdc"])
def test_text_is_shown_whole(capsys: pytest.CaptureFixture, text: str) -> None:
    assert shown(capsys, text.encode()) == f"> {text}\n"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_was_cut_is_shown_as_such(
    capsys: pytest.CaptureFixture, cut: int
) -> None:
    data = "a🙂".encode()[: 1 + cut]
    assert shown(capsys, data, "context full") == "> a\ufffd\n[context full]\n"


def test_bytes_that_are_no_text_hold_nothing_up(capsys: pytest.CaptureFixture) -> None:
    assert shown(capsys, b"a\xffb\xc3") == "> a\ufffdb\ufffd\n"


def test_a_character_appears_with_its_last_byte(capsys: pytest.CaptureFixture) -> None:
    printer = start(load_tokenizer("bytes"), "")
    seen = []
    for token in "a€b".encode():
        printer.add(token)
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "", "", "€", "b"]


def test_only_one_rank_speaks(capsys: pytest.CaptureFixture) -> None:
    printer = start(load_tokenizer("bytes"), "> ", speaks=False)
    printer.add(65)
    printer.close("context full")
    assert capsys.readouterr().out == ""


def test_a_space_between_prompt_and_first_word_is_kept(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"▁old": 0, "▁words": 1, "▁new": 2}, "▁old"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    printer = start(tokenizer, "old")
    for token in tokenizer.encode("new words"):
        printer.add(int(token))
    printer.close(None)
    assert capsys.readouterr().out == "old new words\n"
