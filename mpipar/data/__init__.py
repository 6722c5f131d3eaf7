"""Corpora, tokenizers, token files, and the order in which samples are trained on.

A source of text becomes one array of ids, the same on all ranks (`load_tokens`); a
`Sampler` says which samples each data rank takes in each step, independent of how many
ranks there are; a `Loader` prepares them ahead of time.
"""

from mpipar.data.corpus import documents
from mpipar.data.load import load_tokens, read_ids
from mpipar.data.loader import Loader
from mpipar.data.sampler import Batch, Sampler
from mpipar.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
)
from mpipar.data.tokens import (
    IGNORE,
    TokenStream,
    check_batch,
    check_ids,
    unigram_entropy,
)

__all__ = [
    "IGNORE",
    "Batch",
    "ByteTokenizer",
    "FileTokenizer",
    "Loader",
    "Sampler",
    "TokenStream",
    "Tokenizer",
    "check_batch",
    "check_ids",
    "documents",
    "load_tokenizer",
    "load_tokens",
    "read_ids",
    "unigram_entropy",
]
