"""Tokenizers: bytes, and files of the tokenizers library."""

import pickle

import numpy as np
import pytest

from mpipar.data import FileTokenizer, load_tokenizer
from mpipar.errors import DataError


@pytest.fixture
def word_file(tmp_path):
    """Write a tokenizer.json of few words, with a gap in its ids, that truncates."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "a": 1, "rose": 2, "is": 3, "</s>": 9}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    return str(path)


def test_bytes_round_trip():
    bytes_ = load_tokenizer("bytes")
    text = "naïve ☃\n\t𝄞"
    ids = bytes_.encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text.encode())
    assert bytes_.decode(ids.astype(np.int64)) == text
    assert (bytes_.size, bytes_.end_id) == (256, 0)
    assert bytes_.encode("").size == 0


def test_bytes_encode_and_decode_what_is_not_utf8():
    bytes_ = load_tokenizer("bytes")
    assert bytes_.encode("a\udc80b").tolist() == list(b"a?b")
    assert bytes_.decode(np.array([97, 255, 98])) == "a\ufffdb"


@pytest.mark.parametrize("bad", [-1, 256, 50256])
def test_an_id_that_is_no_byte_is_shown_as_such(bad):
    """A model with a larger vocabulary may draw any id of it."""
    assert load_tokenizer("bytes").decode(np.array([97, bad, 98])) == "a\ufffdb"


def test_a_tokenizer_file_is_used_whole(word_file):
    words = load_tokenizer(word_file)
    ids = words.encode("a rose is a rose")
    assert ids.tolist() == [1, 2, 3, 1, 2]
    assert words.decode(ids) == "a rose is a rose"
    assert (words.size, words.end_id) == (10, 9)


def test_a_tokenizer_file_crosses_to_another_process_by_its_path(word_file):
    words = load_tokenizer(word_file)
    assert words.size == 10
    assert pickle.loads(pickle.dumps(words)).encode("rose").tolist() == [2]


def test_a_missing_or_broken_tokenizer_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere.json"):
        _ = FileTokenizer(str(tmp_path / "nowhere.json")).size
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(DataError, match="broken.json"):
        FileTokenizer(str(broken)).encode("a")
