"""Token streams, token files, the checks of ids, and loading on one rank."""

import math
import pickle

import numpy as np
import pytest

from mpipar.comm import NullCommunicator
from mpipar.data import (
    IGNORE,
    ByteTokenizer,
    TokenStream,
    check_batch,
    check_ids,
    load_tokens,
    read_ids,
    unigram_entropy,
)
from mpipar.data.tokens import map_token_file
from mpipar.errors import DataError


def stream(n, validation=0.0, context=16):
    return TokenStream(np.arange(n), context, validation, "numbers")


@pytest.mark.parametrize(("n", "samples"), [(17, 1), (18, 1), (32, 1), (33, 2)])
def test_a_sample_needs_one_token_more_than_the_context(n, samples):
    """A51: 17 tokens are exactly one sample of 16, and so are 18."""
    tokens = stream(n)
    assert tokens.train_samples == samples
    rows = tokens.rows(np.arange(samples))
    assert rows.dtype == np.int64
    assert rows[0].tolist() == list(range(17))
    assert rows[-1, -1] == 16 * samples


@pytest.mark.parametrize("n", [0, 1, 16])
def test_too_few_tokens_are_refused_with_the_counts(n):
    """A51."""
    with pytest.raises(DataError, match=f"numbers: {n} tokens, {n} .* needs 17 "):
        stream(n)


def test_the_tail_is_held_out():
    tokens = stream(100, validation=0.25)
    assert tokens.train.tolist() == list(range(75))
    assert tokens.held_out.tolist() == list(range(75, 100))
    assert (tokens.train_samples, tokens.held_out_samples) == (4, 1)
    assert tokens.rows(np.array([0]), held_out=True)[0].tolist() == list(range(75, 92))
    assert tokens.note == ""


def test_training_goes_on_without_evaluation_and_says_so():
    """A51: train fine, validation too short."""
    tokens = stream(60, validation=0.2)
    assert (tokens.train_samples, tokens.held_out_samples) == (2, 0)
    assert "the 12 tokens held out are fewer than one sample (17)" in tokens.note
    assert stream(60).held_out_samples == 0
    assert stream(60).note == ""


@pytest.mark.parametrize("dtype", ["u1", "u2", ">u2", "i4", "i8"])
def test_a_token_file_is_mapped_with_its_own_type(tmp_path, dtype):
    path = str(tmp_path / "ids.npy")
    np.save(path, np.arange(100).astype(dtype))
    tokens = load_tokens(path, ByteTokenizer(), 0.1, 16, 100, NullCommunicator("dp"))
    assert isinstance(tokens.ids, np.memmap)
    assert tokens.ids.dtype == dtype
    assert tokens.rows(np.array([1]))[0].tolist() == list(range(16, 33))


def test_a_mapped_stream_is_pickled_by_its_path(tmp_path):
    path = str(tmp_path / "ids.npy")
    np.save(path, np.zeros(1 << 16, dtype=np.uint16))
    tokens = TokenStream(map_token_file(path), 16, 0.1, path)
    packed = pickle.dumps(tokens)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert isinstance(again.ids, np.memmap)
    assert again.train_samples == tokens.train_samples


def refused(path, what):
    with pytest.raises(DataError, match=what) as caught:
        map_token_file(str(path))
    assert str(path) in str(caught.value)


def test_files_that_are_not_rows_of_integers_are_refused_by_name(tmp_path):
    """A51: paths; and nothing from others is unpickled."""
    path = tmp_path / "ids.npy"
    refused(path, "No such file")
    for wrong in (np.zeros((2, 2), int), np.zeros(3), np.zeros(3, bool)):
        np.save(path, wrong)
        refused(path, "one row of integers")
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    refused(path, "not a .npy token file")
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:-8])
    refused(path, "not a .npy token file")
    path.write_bytes(b"")
    refused(path, "not a .npy token file")
    path.unlink()
    path.mkdir()
    refused(path, "is a folder, not a token file")
    path.rmdir()
    path.symlink_to(tmp_path / "gone")
    refused(path, "dangling")


def test_an_empty_token_file_is_refused_with_the_counts(tmp_path):
    """A51."""
    path = str(tmp_path / "ids.npy")
    np.save(path, np.zeros(0, np.uint8))
    with pytest.raises(DataError, match="0 tokens") as caught:
        load_tokens(path, ByteTokenizer(), 0.0, 16, 256, NullCommunicator("dp"))
    assert caught.value.agreed


@pytest.mark.parametrize("bad", [101, 102, 70000, -1])
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(bad):
    """A52: V = 101; 102 lies inside the padding of a vocabulary cut in two."""
    ids = np.zeros(3_000_000, dtype=np.int32)
    ids[2_500_000] = bad
    ids[2_600_000] = 5000
    what = rf"x.npy: token id {bad} at offset 2500007 .* vocabulary of 101 \(0 to 100\)"
    with pytest.raises(DataError, match=what):
        check_ids(ids, 101, "x.npy", start=7)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
def test_every_integer_type_is_checked(dtype):
    """A52."""
    ids = np.array([0, 100, 7], dtype)
    check_ids(ids, 101, "ids")
    for vocab in (7, 100):
        with pytest.raises(DataError, match="token id 100 at offset 1"):
            check_ids(ids, vocab, "ids")
    check_ids(ids, 1 << 40, "ids")


@pytest.mark.parametrize("bad", [101, 102, 70000, -1, IGNORE])
def test_a_batch_may_ignore_in_its_labels_alone(bad):
    """A52: -100 is no input."""
    tokens = np.zeros((2, 3), np.int64)
    labels = tokens.copy()
    labels[1, 1] = bad
    if bad == IGNORE:
        check_batch(tokens, labels, 101)
    else:
        with pytest.raises(DataError, match=f"labels: token id {bad} at offset 4"):
            check_batch(tokens, labels, 101)
    with pytest.raises(DataError, match=f"inputs: token id {bad} at offset 4"):
        check_batch(labels, tokens, 101)


class Numbers:
    """A tokenizer whose ids are spelt out in the text."""

    size = 1 << 20
    end_id = None

    def encode(self, text):
        return np.array(text.split(), dtype=np.uint32)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4"), (128256, "u4")],
)
def test_ids_are_stored_in_the_smallest_type_that_holds_them(tmp_path, vocab, dtype):
    """A52: nothing wraps at the edge of a type; one more is refused."""
    path = tmp_path / "numbers.txt"
    path.write_text(f"0 {vocab - 1}")
    ids = read_ids(str(path), Numbers(), vocab)
    assert ids.dtype == dtype
    assert ids.tolist() == [0, vocab - 1]
    path.write_text(f"0 1 2 {vocab} 4")
    with pytest.raises(DataError, match=f"numbers.txt: token id {vocab} at offset 3"):
        read_ids(str(path), Numbers(), vocab)


def test_text_is_loaded_on_one_rank_as_on_many(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a rose is a rose is a rose")
    args = (str(path), ByteTokenizer(), 0.0, 8, 256)
    tokens = load_tokens(*args, NullCommunicator("dp"))
    assert tokens.ids.tobytes() == b"a rose is a rose is a rose\0"
    assert not tokens.ids.flags.writeable


def test_refusals_of_load_tokens_are_agreed(tmp_path):
    """A51."""
    for name in ("missing.txt", "missing.npy"):
        with pytest.raises(DataError, match=name) as caught:
            path = str(tmp_path / name)
            load_tokens(path, ByteTokenizer(), 0.0, 8, 256, NullCommunicator("dp"))
        assert caught.value.agreed


def test_unigram_entropy_is_in_nats():
    assert unigram_entropy(np.tile(np.arange(8, dtype=np.uint8), 5), 256) == (
        pytest.approx(math.log(8))
    )
    assert unigram_entropy(np.zeros(5, np.uint16), 300) == 0
    skew = np.array([0, 0, 0, 1], np.int64)
    assert unigram_entropy(skew, 2) == pytest.approx(
        -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    )
