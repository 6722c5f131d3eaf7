"""From a source to the same token stream on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpipar.comm import file_work, moved, raise_together
from mpipar.data.corpus import documents
from mpipar.data.tokenizer import Tokenizer
from mpipar.data.tokens import TokenStream, check_ids, map_token_file, token_dtype
from mpipar.errors import DataError

T = TypeVar("T")


def load_tokens(
    source: str,
    tokenizer: Tokenizer,
    validation: float,
    context: int,
    vocab: int,
    comm: Any,
) -> TokenStream:
    """Return the stream of a source, identical on all ranks of `comm` (collective).

    Text is read by rank 0 alone and sent to the others, so that nodes whose files
    differ still train on one corpus. A .npy token file is mapped by every rank, each
    scans its share of the ids, and all must see the same size and type.

    validation, context  as in TokenStream
    vocab                ids must be below it
    Raises               DataError with `agreed` set, on all ranks if on any
    """
    if source.endswith(".npy"):
        ids = _map_everywhere(source, vocab, comm)
    else:
        ids = _read_once(source, tokenizer, vocab, comm)
    stream, error = _attempt(TokenStream, ids, context, validation, source)
    raise_together(error, comm)
    return stream


def read_ids(source: str, tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """Tokenise all documents of a text source; each ends with the tokenizer's mark.

    Returns (t,) of the smallest unsigned type that holds the vocabulary. Ids are
    checked before they are narrowed, so none ever wraps.
    """
    dtype = token_dtype(vocab)
    # A bytearray grows in place: no second copy of the corpus when pieces are joined
    packed = bytearray()
    with file_work("reading", source):
        for document in documents(source):
            for piece in document:
                _append(packed, tokenizer.encode(piece), vocab, source)
                moved()
            if tokenizer.end_id is not None:
                end = np.array([tokenizer.end_id], dtype=np.uint32)
                _append(packed, end, vocab, source)
    return np.frombuffer(packed, dtype=dtype)


def _append(packed: bytearray, ids: np.ndarray, vocab: int, source: str) -> None:
    dtype = token_dtype(vocab)
    check_ids(ids, vocab, source, start=len(packed) // dtype.itemsize)
    packed += ids.astype(dtype, copy=False).data


def _read_once(source: str, tokenizer: Tokenizer, vocab: int, comm: Any) -> np.ndarray:
    ids, error = np.empty(0, token_dtype(vocab)), None
    if comm.rank == 0:
        ids, error = _attempt(read_ids, source, tokenizer, vocab)
    error, size = comm.broadcast_obj((error, 0 if error else ids.size))
    raise_together(error, comm)
    if comm.rank != 0:
        ids = np.empty(size, token_dtype(vocab))
    comm.broadcast(ids)
    ids.flags.writeable = False
    return ids


def _map_everywhere(source: str, vocab: int, comm: Any) -> np.ndarray:
    ids, error = _attempt(map_token_file, source)
    raise_together(error, comm)
    # Two nodes may hold different files under one name
    views = comm.all_gather_obj(f"{ids.size} ids of type {ids.dtype}")
    if len(set(views)) > 1:
        seen = "; ".join(f"rank {rank} sees {view}" for rank, view in enumerate(views))
        error = DataError(f"{source}: is not the same file on all ranks: {seen}")
        raise_together(error, comm)
    # Ranks scan in file order, so the first error is the lowest offset in any layout
    begin, end = (ids.size * r // comm.size for r in (comm.rank, comm.rank + 1))
    with file_work("reading", source):
        _, error = _attempt(check_ids, ids[begin:end], vocab, source, begin)
    errors = comm.all_gather_obj(error)
    raise_together(next(filter(None, errors), None), comm)
    return ids


def _attempt(build: Callable[..., T], *args: Any) -> tuple[T | None, DataError | None]:
    """Return what build(*args) gives, or its refusal, to be agreed on by all ranks."""
    try:
        return build(*args), None
    except DataError as error:
        return None, error
