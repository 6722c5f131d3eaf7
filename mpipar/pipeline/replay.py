"""Passes of a micro-batch that a device does again without being told each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpipar.errors import DeviceError, MpiparError
from mpipar.layers.base import Step
from mpipar.ops import Ops

Array = Any
# Forward and backward passes of a micro-batch, which give its loss
Passes = Callable[[Array, Step], Array]
# Kinds of micro-batches that are kept; with a loss scale that moves there are more
KINDS = 2


class Replays:
    """Records the passes of each kind of micro-batch when the second one comes, and
    launches what was recorded for it and for all later ones.

    The first of a kind is worked on as ever: it makes what is made once. Micro-batches
    are of a kind where their arrays have the same shapes and all that kernels are told
    as numbers is equal.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self._kinds: dict[tuple, _Kind] = {}

    def run(self, x: Array, step: Step, passes: Passes) -> Array:
        """The loss of a micro-batch.

        Raises   DeviceError where its passes cannot be recorded
        """
        key = _key(x, step)
        if key not in self._kinds:
            if len(self._kinds) == KINDS:
                self._kinds.pop(next(iter(self._kinds))).close()
            self._kinds[key] = _Kind(self.ops, x, step)
        kind = self._kinds[key]
        kind.take(x, step)
        return kind.run(passes)


class _Kind:
    """Arrays that stay where they are, and what was recorded on them."""

    def __init__(self, ops: Ops, x: Array, step: Step) -> None:
        self.ops, self.is_new, self.recording = ops, True, None
        self.loss: Array = None
        self.x = ops.xp.empty_like(x)
        own = {name: ops.xp.empty_like(array) for name, array in _arrays(step).items()}
        self.step = replace(step, **own)

    def take(self, x: Array, step: Step) -> None:
        """Brings the numbers of a micro-batch."""
        self.x[...] = x
        own = _arrays(self.step)
        for name, array in _arrays(step).items():
            own[name][...] = array

    def run(self, passes: Passes) -> Array:
        if self.is_new:
            self.is_new = False
            return passes(self.x, self.step)
        if self.recording is None:
            self.recording = self._record(passes)
        self.recording.launch()
        # The next launch writes another one there.
        return self.loss.copy()

    def close(self) -> None:
        self.loss = None
        if self.recording is not None:
            self.recording.close()

    def _record(self, passes: Passes) -> Any:
        try:
            with self.ops.recorded() as recording:
                self.loss = passes(self.x, self.step)
        except MpiparError:
            raise
        except Exception as error:
            raise DeviceError(
                "train.graph = true: the passes of a micro-batch cannot be recorded: "
                f"{error}; try train.graph = false"
            ) from error
        return recording


def _arrays(step: Step) -> dict[str, Array]:
    """Those that differ from one micro-batch to the next."""
    named = {"samples": step.samples, "places": step.places, "labels": step.labels}
    return {name: array for name, array in named.items() if array is not None}


def _key(x: Array, step: Step) -> tuple:
    shapes = tuple((name, array.shape) for name, array in _arrays(step).items())
    return x.shape, shapes, step.valid, step.sequences, step.length, step.loss_scale
