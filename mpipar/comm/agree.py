"""An error found on one rank becomes an error of all ranks."""

import pickle
from typing import TYPE_CHECKING

from mpipar.errors import MpiparError

if TYPE_CHECKING:
    from mpipar.comm.communicator import Communicator
    from mpipar.comm.null import NullCommunicator


def raise_together(
    error: Exception | None, comm: "Communicator | NullCommunicator"
) -> None:
    """Raise on every rank of ``comm`` if any rank brings an error; else return.

    Every rank must call it. The error raised has the class and the attributes of the
    lowest failing rank's, lists each failing rank's message (equal ones once) and
    carries ``agreed = True``, so it is printed once and nobody is aborted. On the
    failing ranks their own error is its cause.
    """
    if comm.size == 1:
        if error is not None:
            error.agreed = True
            raise error
        return
    found = comm.all_gather_obj(None if error is None else _pack(error))
    failed = {rank: pack for rank, pack in enumerate(found) if pack is not None}
    if failed:
        first = next(iter(failed.values()))
        message = _join({rank: text for rank, (_, text) in failed.items()}, comm.size)
        raise _unpack(first, message) from error


def _pack(error: Exception) -> tuple[bytes, str]:
    """Class and attributes as bytes, and the message; MpiparError for local classes."""
    try:
        recipe = pickle.dumps((type(error), error.__dict__))
        pickle.loads(recipe)
    except Exception:
        recipe = pickle.dumps((MpiparError, {}))
        return recipe, f"{type(error).__name__}: {error}"
    return recipe, str(error)


def _unpack(packed: tuple[bytes, str], message: str) -> Exception:
    """Make the error anew, without its ``__init__``, whose arguments are unknown."""
    kind, attributes = pickle.loads(packed[0])
    try:
        error = kind.__new__(kind, message)
        error.args = (message,)
        telling = bool(str(error))
    except Exception:
        telling = False
    if not telling:
        error = MpiparError(f"{kind.__name__}: {message}")
    error.__dict__.update(attributes)
    error.agreed = True
    return error


def _join(messages: dict[int, str], size: int) -> str:
    """One message of all, each text once with the ranks it came from."""
    ranks: dict[str, list[int]] = {}
    for rank, text in messages.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(messages) == size:
        return next(iter(ranks))
    return "\n".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    )
