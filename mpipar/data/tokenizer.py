"""Tokenizers: raw bytes, and any `tokenizer.json` of the tokenizers library.

Both encode text to ids and back, and name the id that marks the end of a document.
"""

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from mpipar.comm import file_work
from mpipar.errors import DataError

# Names under which the usual families store their end-of-document token
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """What the rest of the room needs of a tokenizer."""

    @property
    def size(self) -> int:
        """Number of ids: every id is in [0, size)."""

    @property
    def end_id(self) -> int | None:
        """Id that marks the end of a document; None if there is no such token."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, 1-D, unsigned."""

    def decode(self, ids: np.ndarray) -> str:
        """Text of 1-D ids."""


class ByteTokenizer:
    """One id for each byte of the UTF-8 text; id 0, the NUL byte, ends a document.

    What cannot be encoded (a lone surrogate) becomes "?"; what does not decode
    becomes U+FFFD.
    """

    size = 256
    end_id = 0

    def encode(self, text: str) -> np.ndarray:
        """Bytes of the text, uint8."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        """Text of the bytes; an id that is no byte becomes U+FFFD, too."""
        ids = np.asarray(ids)
        is_byte = (ids >= 0) & (ids < 256)
        # No UTF-8 text has a byte 255.
        text = np.where(is_byte, ids, 255).astype(np.uint8).tobytes()
        return text.decode("utf-8", "replace")


class FileTokenizer:
    """A `tokenizer.json`, read when it is first needed.

    Special tokens are never added, and truncation and padding that the file may ask
    for are switched off: a corpus is tokenised whole. The end of a document is the
    first of END_TOKENS that the file knows.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}

    @cached_property
    def _inner(self) -> Any:
        from tokenizers import Tokenizer as Inner

        # The library raises a bare Exception, whatever is wrong with the file
        try:
            with file_work("reading", self.path):
                inner = Inner.from_file(self.path)
        except Exception as error:
            raise DataError(f"tokenizer {self.path}: {error}") from error
        inner.no_truncation()
        inner.no_padding()
        return inner

    @cached_property
    def size(self) -> int:
        # Ids may have gaps, so the number of tokens is not enough
        return max(self._inner.get_vocab().values(), default=-1) + 1

    @cached_property
    def end_id(self) -> int | None:
        ids = (self._inner.token_to_id(token) for token in END_TOKENS)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, uint32."""
        ids = self._inner.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        """Text of the ids, special tokens left out."""
        return self._inner.decode(np.asarray(ids).tolist())


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called "bytes", or the one in the file `name`.

    A file is read at first use; a missing or broken one then raises DataError.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)
