"""Runs a schedule on the units of this stage and owns everything in flight."""

from collections.abc import Sequence
from typing import Any

from mpipar.errors import ShapeError
from mpipar.layers.base import Layer, Step, nbytes
from mpipar.layers.model import UnitHooks
from mpipar.pipeline.schedules import Action

Array = Any


class Executor:
    """Runs schedules over a row of units, the last of which returns the loss.

    hooks        told before and after every run of a unit
    peak_bytes   most bytes that forward passes had saved during the last run; what a
                 backward pass holds meanwhile is not counted
    """

    def __init__(self, units: Sequence[Layer], hooks: UnitHooks) -> None:
        self.units, self.hooks = list(units), hooks
        self.peak_bytes = 0
        self._saved: dict[int, list] = {}

    def run(
        self,
        actions: Sequence[Action],
        inputs: Sequence[Array],
        steps: Sequence[Step],
    ) -> list[float]:
        """Loss of each micro-batch, summed over its tokens.

        actions    what to do, in order
        inputs     token ids (b, s) of each micro-batch
        """
        self.peak_bytes = 0
        losses = [0.0] * len(inputs)
        last = max((a.micro_batch for a in actions if a.kind == "BW"), default=-1)
        keep = last >= 0
        for kind, number in actions:
            if kind == "F":
                losses[number] = self._forward(
                    inputs[number], steps[number], number, keep
                )
            else:
                self._backward(number, last=number == last)
        if self._saved:
            raise ShapeError(
                f"schedule left micro-batches {sorted(self._saved)} in flight"
            )
        return losses

    def _forward(self, x: Array, step: Step, number: int, keep: bool) -> float:
        saved = []
        for index, unit in enumerate(self.units):
            self.hooks.forward_begins(index)
            x, kept = unit.forward(x, step)
            self.hooks.forward_ended(index)
            if keep:
                saved.append(kept)
        if keep:
            self._saved[number] = saved
            self.peak_bytes = max(self.peak_bytes, nbytes(*self._saved.values()))
        return x

    def _backward(self, number: int, *, last: bool) -> None:
        saved = self._saved.pop(number)
        dy = None
        for index in range(len(self.units) - 1, -1, -1):
            self.hooks.backward_begins(index)
            dy = self.units[index].backward(dy, saved.pop())
            self.hooks.backward_ended(index, last=last)
