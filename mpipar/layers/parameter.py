"""Parameters: one rank's box of a global, layout-independent tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mpipar.comm import shares
from mpipar.errors import ShapeError
from mpipar.ops import Ops

Array = Any
Interval = tuple[int, int]


def cut(size: int, parts: int, index: int) -> Interval:
    """Part `index` of `size` items cut evenly; the first size % parts get one more."""
    sizes = shares(size, parts)
    lo = sum(sizes[:index])
    return lo, lo + sizes[index]


@dataclass(eq=False)
class Parameter:
    """The part of a global tensor that this rank holds, and its gradient.

    name      global name, such as blocks.3.attention.q.weight
    shape     global shape
    box       this rank's half-open interval in each dim
    init      how it starts: normal (with std), zeros or ones
    partial   axis over which the local gradient is a summand ("tp" or "kv"), summed
              once per step; "" where the gradient is complete or the tensor is cut
    owner     False on ranks that hold a copy which another rank already counts
    tied      True where another pipeline stage has the same weight, whose gradient is
              the other summand
    axis      of the grid: ranks that hold the same box, over which gradients are summed
    data, grad   arrays of the box's shape, views of a flat buffer once bound
    """

    name: str
    shape: tuple[int, ...]
    box: tuple[Interval, ...]
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0
    partial: str = ""
    owner: bool = True
    tied: bool = False
    axis: str = "grad"
    data: Array = field(default=None, repr=False)
    grad: Array = field(default=None, repr=False)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's box."""
        return tuple(hi - lo for lo, hi in self.box)

    @property
    def size(self) -> int:
        """Elements of this rank's box."""
        count = 1
        for length in self.local_shape:
            count *= length
        return count

    @property
    def decays(self) -> bool:
        """Matrices decay, embeddings included; gains and biases do not."""
        return len(self.shape) > 1

    def initialize(self, ops: Ops, seed: int) -> None:
        """Sets the starting values; they depend on the global index alone."""
        if self.init == "normal":
            ops.fill_normal(
                self.data,
                std=self.std,
                seed=seed,
                name=self.name,
                shape=self.shape,
                box=self.box,
            )
        else:
            value = 1.0 if self.init == "ones" else 0.0
            ops.store(ops.zeros(self.local_shape) + ops.dtype.type(value), self.data)


def whole(
    name: str, shape: tuple[int, ...], init: str, *, partial: str, owner: bool
) -> Parameter:
    """A parameter that every rank of tp holds in full."""
    box = tuple((0, size) for size in shape)
    return Parameter(name, shape, box, init, partial=partial, owner=owner)


class Stack:
    """Parameters whose rows follow each other in memory, so that one GEMM serves all.

    q, k and v (or gate and up) stay separate global tensors, yet are read as a single
    array (Σ rows, d). They must be bound to adjacent parts of one flat buffer.
    """

    def __init__(self, parts: Sequence[Parameter]) -> None:
        self.parts = list(parts)

    @property
    def rows(self) -> int:
        """Rows of all parts together."""
        return sum(p.local_shape[0] for p in self.parts)

    @property
    def data(self) -> Array:
        """The values as one array."""
        return _joined([p.data for p in self.parts])

    @property
    def grad(self) -> Array:
        """The gradients as one array."""
        return _joined([p.grad for p in self.parts])


def _joined(views: list[Array]) -> Array:
    """One view over views that follow each other in the same one-dimensional buffer."""
    first = views[0]
    if len(views) == 1:
        return first
    buffer = first.base
    itemsize = buffer.dtype.itemsize
    start = (_address(first) - _address(buffer)) // itemsize
    stop = start
    for view in views:
        if (
            view.base is not buffer
            or _address(view) != _address(buffer) + stop * itemsize
        ):
            raise ShapeError("the parts of a stack are not adjacent in memory")
        stop += view.size
    return buffer[start:stop].reshape(-1, *first.shape[1:])


def _address(x: Array) -> int:
    """Where the first element lies, on host or device."""
    return x.ctypes.data if hasattr(x, "ctypes") else x.data.ptr
