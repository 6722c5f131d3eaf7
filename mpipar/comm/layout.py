"""Layouts of an array over one axis, and the moves between them.

    S(i)  cut along dim i, in rank order, the first ranks one longer if need be
    R     replicated: equal copies
    P     partial: the array is the sum of the ranks' values

Every move is the identity on the logical array, so its backward brings the cotangent
into the layout that the producer needs (``adjoint``).

    from    to     message          bytes sent per rank
    R       S(i)   none, a view     0
    R       P      none             0
    S(i)    R      all-gather       (n-1)/n N
    P       S(i)   reduce-scatter   (n-1)/n N
    P       R      all-reduce       2(n-1)/n N
    S(i)    S(j)   all-to-all       (n-1)/n^2 N

N is the size of the logical array. S(i) to P is refused: it would write n arrays mostly
of zeros. Source: GSPMD (arXiv:2105.04663), OneFlow SBP (arXiv:2110.15032).
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from mpipar.comm.counters import shares
from mpipar.comm.transport import Array
from mpipar.errors import ShapeError

if TYPE_CHECKING:
    from mpipar.comm.communicator import Communicator
    from mpipar.comm.null import NullCommunicator


@dataclass(frozen=True, slots=True)
class S:
    """Cut along ``dim``, counted from 0."""

    dim: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ShapeError(f"S({self.dim}): count the dim from the front, from 0")


class Whole(Enum):
    """The layouts in which every rank holds an array of the full shape."""

    R = "replicated"
    P = "partial"

    def __repr__(self) -> str:
        return self.name


R = Whole.R
P = Whole.P
Layout = S | Whole


def reshard(
    x: Array,
    source: Layout,
    target: Layout,
    comm: "Communicator | NullCommunicator",
    length: int | None = None,
) -> Array:
    """Return the own part in ``target`` of the array whose part in ``source`` is ``x``.

    length  of the cut dim of the whole array, needed where ``source`` is uneven

    P to R overwrites ``x`` and returns it. R to S(i) returns a view of ``x``. X to X,
    and R to P on rank 0, return ``x``. Everything else is a new, C-contiguous array.
    Raises ShapeError if there is no such move or the sizes do not allow it.
    """
    _check(x, source, target, comm, length)
    if source == target or comm.size == 1:
        return x
    if target is P:
        return x if comm.rank == 0 else _empty(x, x.shape, zero=True)
    if source is R:
        return _slice(x, target.dim, shares(x.shape[target.dim], comm.size), comm.rank)
    if source is P and target is R:
        return comm.all_reduce(x)
    if source is P:
        return _scatter(x, target.dim, comm)
    if target is R:
        return _gather(x, source.dim, comm, length)
    return _turn(x, source.dim, target.dim, comm, length)


def adjoint(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Return (source, target) of the backward of the move ``source`` to ``target``.

    An array that is used replicated (R to R, S(i) to R) gets a partial cotangent, one
    summand from every rank's use. Summands (P) get the whole cotangent, replicated.
    """
    _refuse(source, target)
    if target is R and source is not P:
        return P, source
    return (R if target is P else target), (R if source is P else source)


def volume(source: Layout, target: Layout, n: int, nbytes: int) -> int:
    """Bytes that one of ``n`` ranks sends in a move of an array of ``nbytes``.

    Exact where n divides the sizes; otherwise the mean over ranks, rounded up.
    """
    _refuse(source, target)
    if source == target or source is R:
        return 0
    if source is P:
        return -(-(n - 1) * nbytes * (2 if target is R else 1) // n)
    return -(-(n - 1) * nbytes // (n if target is R else n * n))


def _refuse(source: Layout, target: Layout) -> None:
    if isinstance(source, S) and target is P:
        raise ShapeError(f"there is no move from {source} to P: use R to P, or keep S")


def _check(
    x: Array, source: Layout, target: Layout, comm: "Communicator", length: int | None
) -> None:
    _refuse(source, target)
    for layout in (source, target):
        if isinstance(layout, S) and layout.dim >= x.ndim:
            raise ShapeError(f"{layout} does not exist in an array of shape {x.shape}")
    if length is not None and isinstance(source, S):
        expected = shares(length, comm.size)[comm.rank]
        if x.shape[source.dim] != expected:
            raise ShapeError(
                f"rank {comm.rank} of {comm.size} holds {x.shape[source.dim]} of "
                f"{length} along dim {source.dim}, and should hold {expected}"
            )


def _slice(x: Array, dim: int, sizes: list[int], part: int) -> Array:
    """View of part ``part`` of ``x``, cut along ``dim`` in ``sizes``."""
    start = sum(sizes[:part])
    return x[(slice(None),) * dim + (slice(start, start + sizes[part]),)]


def _empty(like: Array, shape: tuple[int, ...], *, zero: bool = False) -> Array:
    """A C-contiguous array of the type of ``like``, in its kind of memory."""
    if isinstance(like, np.ndarray):
        xp = np
    else:
        import cupy as xp
    return (xp.zeros if zero else xp.empty)(shape, like.dtype)


def _pack(x: Array, dim: int, sizes: list[int]) -> Array:
    """Lay the parts of ``x`` along ``dim`` in a row: flat, at most one copy."""
    if math.prod(x.shape[:dim]) == 1:
        return x.reshape(-1)
    flat = _empty(x, (x.size,))
    at = 0
    for part in range(len(sizes)):
        block = _slice(x, dim, sizes, part)
        flat[at : at + block.size].reshape(block.shape)[...] = block
        at += block.size
    return flat


def _unpack(flat: Array, shape: tuple[int, ...], dim: int, sizes: list[int]) -> Array:
    """Undo ``_pack``: ``shape`` is that of the whole."""
    if math.prod(shape[:dim]) == 1:
        return flat.reshape(shape)
    x = _empty(flat, shape)
    at = 0
    for part in range(len(sizes)):
        block = _slice(x, dim, sizes, part)
        block[...] = flat[at : at + block.size].reshape(block.shape)
        at += block.size
    return x


def _gather(x: Array, dim: int, comm: "Communicator", length: int | None) -> Array:
    whole = x.shape[dim] * comm.size if length is None else length
    sizes = shares(whole, comm.size)
    shape = (*x.shape[:dim], whole, *x.shape[dim + 1 :])
    row = math.prod(shape) // whole if whole else 0
    counts = None if whole % comm.size == 0 else [size * row for size in sizes]
    return _unpack(comm.all_gather(x.reshape(-1), counts), shape, dim, sizes)


def _scatter(x: Array, dim: int, comm: "Communicator") -> Array:
    sizes = shares(x.shape[dim], comm.size)
    row = x.size // x.shape[dim] if x.shape[dim] else 0
    own = comm.reduce_scatter(_pack(x, dim, sizes), [size * row for size in sizes])
    return own.reshape((*x.shape[:dim], sizes[comm.rank], *x.shape[dim + 1 :]))


def _turn(
    x: Array, cut: int, dim: int, comm: "Communicator", length: int | None
) -> Array:
    """From S(cut) to S(dim): both must be even."""
    n = comm.size
    for at, size in ((dim, x.shape[dim]), (cut, length or 0)):
        if size % n:
            raise ShapeError(
                f"S({cut}) to S({dim}): {n} ranks do not divide dim {at} of size {size}"
            )
    sizes = [x.shape[dim] // n] * n
    came = comm.all_to_all(_pack(x, dim, sizes))
    shape = list(x.shape)
    shape[dim] //= n
    shape[cut] *= n
    return _unpack(came, tuple(shape), cut, [x.shape[cut]] * n)
