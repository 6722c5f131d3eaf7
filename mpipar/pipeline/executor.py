"""Runs a schedule on the units of this stage and owns everything in flight."""

from collections.abc import Collection, Sequence
from typing import Any

from mpipar.errors import ShapeError
from mpipar.layers.base import Layer, Step, nbytes
from mpipar.layers.model import UnitHooks
from mpipar.pipeline.schedules import Action

Array = Any


def peak_saved(saved: Sequence[int], given: int, again: Collection[int]) -> int:
    """Most bytes that one micro-batch keeps, as `Executor.peak_bytes` counts them.

    saved   what each unit saves;  given  the input that those of `again` keep instead
    """
    kept = [given if i in again else size for i, size in enumerate(saved)]
    return max(sum(kept), *(sum(kept[:i]) + saved[i] for i in again), 0)


class Executor:
    """Runs schedules over a row of units, the last of which returns the loss.

    hooks        told before and after every run of a unit
    again        which units save their input alone, and run forward again before
                 backward (Chen et al. 2016)
    peak_bytes   most bytes that forward passes had saved during the last run, those
                 made again included; what a backward pass holds is not counted
    """

    def __init__(
        self, units: Sequence[Layer], hooks: UnitHooks, again: Collection[int] = ()
    ) -> None:
        self.units, self.hooks, self.again = list(units), hooks, frozenset(again)
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
                self._backward(number, steps[number], last=number == last)
        if self._saved:
            raise ShapeError(
                f"schedule left micro-batches {sorted(self._saved)} in flight"
            )
        return losses

    def _forward(self, x: Array, step: Step, number: int, keep: bool) -> float:
        saved = []
        for index, unit in enumerate(self.units):
            self.hooks.forward_begins(index)
            given = x
            x, kept = unit.forward(x, step)
            self.hooks.forward_ended(index)
            if keep:
                saved.append(given if index in self.again else kept)
                del kept
        if keep:
            self._saved[number] = saved
            self.peak_bytes = max(self.peak_bytes, nbytes(*self._saved.values()))
        return x

    def _backward(self, number: int, step: Step, *, last: bool) -> None:
        saved = self._saved[number]
        dy = None
        for index in range(len(self.units) - 1, -1, -1):
            self.hooks.backward_begins(index)
            kept = saved.pop()
            if index in self.again:
                _, kept = self.units[index].forward(kept, step)
                held = nbytes(*self._saved.values(), kept)
                self.peak_bytes = max(self.peak_bytes, held)
            dy = self.units[index].backward(dy, kept)
            self.hooks.backward_ended(index, last=last)
        del self._saved[number]
