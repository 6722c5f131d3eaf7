"""The layer protocol: forward, input gradient, weight gradient.

forward(x, step) -> y, saved          saved belongs to the caller; a layer keeps nothing
backward_input(dy, saved) -> dx, left all messages of the backward pass happen here
backward_weight(left)                 adds to the gradients, as nothing else does;
                                      local, may be deferred
backward(dy, saved) -> dx             both at once

A layer leaves the arrays it is given intact; the array it returns is the caller's, who
may overwrite it. Deferred weight gradients run first-in first-out.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.layers.cost import Cost
from mpipar.layers.parameter import Parameter

if TYPE_CHECKING:
    from mpipar.layers.cache import KeyValueCache

Array = Any


@dataclass(frozen=True, eq=False)
class Step:
    """What a forward pass must know of its micro-batch; it belongs to the caller.

    positions   (s,) global positions of the tokens that this rank holds
    places      (b or 1, s) their places among learned positions; None = as positions
    firsts      (b or 1, whole length) on the host: the first position of each token's
                document; None = 0
    samples     (b,) global sample numbers, which select the dropout masks
    labels      (b, s) target ids, negative where there is none; None in generation
    valid       valid labels in the whole step, over all ranks and micro-batches
    number      optimizer step;  seed  of the run: both select the dropout masks
    sequences   in the whole step;  length  positions of each that are no padding, 0 =
                all
    loss_scale  what the loss is multiplied by in the backward pass
    training    False switches dropout off
    cache       keys and values of earlier positions, in generation
    kept        what layers make once for all of them
    loads       by layer, what this rank's tokens chose in this step: (experts + 1,)
                choices of each expert and dropped ones; None = not counted
    """

    positions: Array
    samples: Array
    places: Array | None = None
    firsts: np.ndarray | None = None
    labels: Array | None = None
    valid: int = 1
    number: int = 0
    seed: int = 0
    sequences: int = 1
    length: int = 0
    loss_scale: float = 1.0
    training: bool = True
    cache: "KeyValueCache | None" = None
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict)
    loads: dict[str, np.ndarray] | None = None


class Layer:
    """Base of all layers. Subclasses define forward and backward_input."""

    def parameters(self) -> Iterator[Parameter]:
        """The layer's parameters in the order they lie in memory."""
        yield from ()

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        """y, and what the backward pass needs."""
        raise NotImplementedError

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """dx, and what the weight gradient needs."""
        raise NotImplementedError

    def backward_weight(self, left: Any) -> None:
        """Adds the weight gradients; nothing where there are none left."""

    def backward(self, dy: Array, saved: Any) -> Array:
        """dx, weight gradients added."""
        dx, left = self.backward_input(dy, saved)
        self.backward_weight(left)
        return dx

    def forget(self) -> None:
        """From now on, saves nothing that one pass without a product makes again."""

    def cost(self, batch: int, sequence: int) -> Cost:
        """Cost of a micro-batch of `batch` sequences of `sequence` positions."""
        raise NotImplementedError


class Branch(Layer):
    """A layer that can add what its output is added to: a residual block's branch.

    Its input is kept as `inputs.x` of what it saves, which a caller who can make it
    again may take away until the backward pass.
    """

    def forward(
        self, x: Array, step: Step, onto: Array | None = None
    ) -> tuple[Array, Any]:
        """y + onto, and what the backward pass needs."""
        raise NotImplementedError


class Chain(Layer):
    """Layers applied one after another."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)

    def parameters(self) -> Iterator[Parameter]:
        for layer in self.layers:
            yield from layer.parameters()

    def forward(self, x: Array, step: Step) -> tuple[Array, list]:
        saved = []
        for layer in self.layers:
            x, kept = layer.forward(x, step)
            saved.append(kept)
        return x, saved

    def backward_input(self, dy: Array, saved: list) -> tuple[Array, list]:
        left = []
        for layer in reversed(self.layers):
            dy, kept = layer.backward_input(dy, saved.pop())
            left.append(kept)
        return dy, left

    def backward_weight(self, left: list) -> None:
        for layer, kept in zip(reversed(self.layers), left, strict=True):
            layer.backward_weight(kept)

    def forget(self) -> None:
        for layer in self.layers:
            layer.forget()

    def cost(self, batch: int, sequence: int) -> Cost:
        return sum((layer.cost(batch, sequence) for layer in self.layers), Cost())


def nbytes(*kept: Any) -> int:
    """Bytes of all distinct arrays held by `saved` and `left` objects.

    A view counts as the whole array it keeps alive; an array held twice counts once. A
    Step does not count: it belongs to the caller.
    """
    buffers: dict[int, int] = {}
    _collect(kept, buffers)
    return sum(buffers.values())


def _collect(kept: Any, buffers: dict[int, int]) -> None:
    if kept is None or isinstance(kept, (int, float, Step)):
        return
    if isinstance(kept, (list, tuple)):
        for item in kept:
            _collect(item, buffers)
    elif dataclasses.is_dataclass(kept):
        for slot in dataclasses.fields(kept):
            _collect(getattr(kept, slot.name), buffers)
    elif hasattr(kept, "nbytes"):
        while getattr(kept, "base", None) is not None and _is_array(kept.base):
            kept = kept.base
        buffers[id(kept)] = kept.nbytes
    else:
        raise TypeError(f"cannot size a {type(kept).__name__} kept by a layer")


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or hasattr(x, "__cuda_array_interface__")
