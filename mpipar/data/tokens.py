"""One long array of token ids, its split in train and held-out text, and its checks."""

from dataclasses import dataclass

import numpy as np

from mpipar.comm import file_work, moved
from mpipar.data.corpus import check_file
from mpipar.errors import DataError

# Label of a position that does not count; no input may hold it
IGNORE = -100
_SCANNED_IDS = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenStream:
    """All ids of a corpus, cut into samples of `context` tokens.

    The last `validation` fraction of the tokens is held out. In each part sample i is
    part[i·S : i·S + S + 1] with S = context: S inputs and, one place on, S labels, so
    neighbours share one token and a part of t tokens has (t − 1) // S samples.

    ids         (t,) any integer type, in memory or mapped from a token file
    context     tokens a sample trains on
    validation  fraction of tokens held out; 0 holds out none
    source      name used in messages
    Raises      DataError if the train part has no sample
    """

    ids: np.ndarray
    context: int
    validation: float
    source: str

    def __post_init__(self) -> None:
        if self.train_samples < 1:
            raise DataError(
                f"{self.source}: {self.ids.size} tokens, {self.train.size} of them to "
                f"train on; one sample needs {self.context + 1} (context + 1)"
            )

    def __reduce__(self) -> tuple:
        # A mapped file crosses to another process as its path, not as its content
        mapped = isinstance(self.ids, np.memmap)
        ids = str(self.ids.filename) if mapped else np.asarray(self.ids)
        return _rebuild, (ids, self.context, self.validation, self.source)

    @property
    def train(self) -> np.ndarray:
        """Ids to train on."""
        return self.ids[: self.ids.size - self._held_out_tokens]

    @property
    def held_out(self) -> np.ndarray:
        """Ids kept for evaluation."""
        return self.ids[self.ids.size - self._held_out_tokens :]

    @property
    def train_samples(self) -> int:
        """Number of samples in the train part."""
        return max(0, self.train.size - 1) // self.context

    @property
    def held_out_samples(self) -> int:
        """Number of samples in the held-out part; 0 means there is no evaluation."""
        return max(0, self.held_out.size - 1) // self.context

    @property
    def note(self) -> str:
        """What a user should know about the split; empty if all is as asked."""
        if not self.validation or self.held_out_samples:
            return ""
        return (
            f"{self.source}: no evaluation, the {self.held_out.size} tokens held out "
            f"are fewer than one sample ({self.context + 1})"
        )

    def rows(self, samples: np.ndarray, held_out: bool = False) -> np.ndarray:
        """Return the tokens of the samples, (b, S + 1), int64."""
        part = self.held_out if held_out else self.train
        places = samples[:, None] * self.context + np.arange(self.context + 1)
        return np.asarray(part[places], dtype=np.int64)

    @property
    def _held_out_tokens(self) -> int:
        return int(self.ids.size * self.validation)


def _rebuild(
    ids: np.ndarray | str, context: int, validation: float, source: str
) -> TokenStream:
    array = map_token_file(ids) if isinstance(ids, str) else ids
    return TokenStream(array, context, validation, source)


def map_token_file(path: str) -> np.ndarray:
    """Map a .npy file of token ids, (t,), read-only; nothing in it is unpickled."""
    try:
        with file_work("opening", path):
            check_file(path, "token file")
            ids = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path}: not a .npy token file: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise DataError(
            f"{path}: holds {ids.dtype} of shape {ids.shape}; "
            "a token file is one row of integers"
        )
    return ids


def check_ids(ids: np.ndarray, vocab: int, where: str, start: int = 0) -> None:
    """Refuse the first id that is not in [0, vocab).

    ids    (t,) integers, read in pieces, so that a mapped file never fills memory
    where  name of the file or array for the message
    start  offset of ids[0] in it, in tokens
    """
    limits = np.iinfo(ids.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return
    for begin in range(0, ids.size, _SCANNED_IDS):
        moved()
        piece = ids[begin : begin + _SCANNED_IDS]
        bad = (piece < 0) | (piece >= vocab)
        if bad.any():
            at = int(bad.argmax())
            raise DataError(
                f"{where}: token id {piece[at]} at offset {start + begin + at} "
                f"is not in the vocabulary of {vocab} (0 to {vocab - 1})"
            )


def check_batch(tokens: np.ndarray, labels: np.ndarray, vocab: int) -> None:
    """Refuse inputs (b, s) outside [0, vocab), and labels that are not IGNORE either.

    The offset in the message counts places of the flattened array.
    """
    check_ids(tokens.ravel(), vocab, "inputs")
    flat = labels.ravel()
    check_ids(np.where(flat == IGNORE, 0, flat), vocab, "labels")


def token_dtype(vocab: int) -> np.dtype:
    """Return the smallest unsigned type that holds every id of the vocabulary."""
    return np.min_scalar_type(vocab - 1)


def unigram_entropy(ids: np.ndarray, vocab: int) -> float:
    """Return the entropy of single tokens, in nats: the loss of a model blind to order.

    ids  (t,) checked ids, at least one
    """
    counts = np.zeros(vocab, dtype=np.int64)
    for begin in range(0, ids.size, _SCANNED_IDS):
        piece = ids[begin : begin + _SCANNED_IDS].astype(np.int64, copy=False)
        counts += np.bincount(piece, minlength=vocab)
    shares = counts[counts > 0] / ids.size
    return float(-(shares * np.log(shares)).sum())
