"""Runs a schedule on the units of this stage and owns everything in flight."""

import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpipar.errors import ShapeError
from mpipar.layers.base import Layer, Step, nbytes
from mpipar.layers.model import UnitHooks
from mpipar.pipeline.replay import Replays
from mpipar.pipeline.schedules import Action
from mpipar.pipeline.transfer import Transfer

Array = Any
Key = tuple[int, int]  # chunk, micro-batch


class Held(NamedTuple):
    """Bytes of one unit and micro-batch.

    saved  by forward;  left  by the input gradient;  given  of its input
    """

    saved: int
    left: int
    given: int


def peak_bytes(
    actions: Iterable[Action],
    chunks: Sequence[range],
    held: Sequence[Held],
    again: Collection[int],
) -> int:
    """Most bytes that a stage holds, as `Executor.peak_bytes` counts them.

    chunks  units of each;  held  of each unit;  again  as in `Executor`
    """
    kept = [h.given if i in again else h.saved for i, h in enumerate(held)]
    now = peak = 0
    for kind, _, chunk in actions:
        if kind == "F":
            now += sum(kept[i] for i in chunks[chunk])
        elif kind == "W":
            now -= sum(held[i].left for i in chunks[chunk])
        else:
            for index in reversed(chunks[chunk]):
                now -= kept[index]
                if index in again:
                    peak = max(peak, now + held[index].saved)
                if kind == "B":
                    now += held[index].left
        peak = max(peak, now)
    return peak


class Executor:
    """Runs actions over the units of one stage; the last of the model returns the loss.

    units, chunks  as in `Model`
    hooks          told before and after every run of a unit
    transfer       to and from the other stages
    again          which units save their input alone, and run forward again before
                   backward (Chen et al. 2016)
    replays        does both passes of a micro-batch when its forward pass is due, from
                   a recording; for a stage alone, whose units need no messages

    peak_bytes     most bytes held between actions of the last run (with replays: of
                   all): saved by forward passes, or left for weight gradients; a unit
                   made again counts too
    peak_in_flight most chunks held at a time that had run forward, and whose weight
                   gradients were missing
    timing         seconds of the last run that it waited for other stages, and all
    work           seconds without waiting, and number, of all actions of training so
                   far, by kind and chunk
    """

    def __init__(
        self,
        units: Sequence[Layer],
        chunks: Sequence[range],
        hooks: UnitHooks,
        transfer: Transfer,
        again: Collection[int] = (),
        replays: Replays | None = None,
    ) -> None:
        self.replays = replays
        self.units, self.chunks, self.hooks = list(units), list(chunks), hooks
        self.transfer, self.again = transfer, frozenset(again)
        self.peak_bytes = self.peak_in_flight = 0
        self.timing = 0.0, 0.0
        self._waited = 0.0
        self.work: dict[tuple[str, int], tuple[float, int]] = {}
        self._saved: dict[Key, list] = {}
        self._left: dict[Key, list] = {}
        # Bytes of what is held
        self._sizes: dict[Key, int] = {}
        self._steps: dict[int, Step] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of what is in flight now."""
        return sum(self._sizes.values())

    def run(
        self,
        actions: Sequence[Action],
        inputs: Sequence[Array],
        shapes: Sequence[tuple[int, ...]],
        steps: Sequence[Step],
        *,
        goes_on: bool = False,
    ) -> list[Any]:
        """Loss of each micro-batch, summed over its tokens, as the head has it; 0 where
        the head is not.

        actions    what to do, in order
        inputs     token ids (b, s) of each micro-batch
        shapes     of each in the residual stream, (b, s/u, d)
        goes_on    what is in flight at the end belongs to negative micro-batches of the
                   next run
        """
        began = time.perf_counter()
        if self.replays is None:
            self.peak_bytes = self.peak_in_flight = 0
        self._waited = 0.0
        self._steps |= dict(enumerate(steps))
        losses = [0.0] * len(inputs)
        finals = {(a.chunk, a.micro_batch < 0): a for a in actions if "W" in a.kind}
        self.transfer.begin(actions, shapes)
        for action in actions:
            kind, number, chunk = action
            last = finals.get((chunk, number < 0)) == action
            mark = time.perf_counter() - self._waited
            self.hooks.action_begins(number)
            if self.replays is not None and finals:
                if kind == "F":
                    passes = partial(self._both, chunk, number)
                    step = self._steps[number]
                    losses[number] = self.replays.run(inputs[number], step, passes)
                elif last:
                    self._conclude(chunk)
            elif kind == "F":
                loss = self._forward(chunk, number, inputs[number], keep=bool(finals))
                if self.transfer.is_last(chunk):
                    losses[number] = loss
            elif kind == "W":
                self._weights(chunk, number, last=last)
            else:
                self._backward(chunk, number, weights=kind == "BW", last=last)
            self.hooks.action_ended(number)
            if finals:
                spent, count = self.work.get((kind, chunk), (0.0, 0))
                spent += time.perf_counter() - self._waited - mark
                self.work[kind, chunk] = spent, count + 1
        self.transfer.finish(goes_on=goes_on)
        self._end(len(steps) if finals else 0, goes_on=goes_on)
        if finals:
            self.timing = self._waited, time.perf_counter() - began
        return losses

    def _end(self, count: int, *, goes_on: bool) -> None:
        """Nothing is in flight after `count` micro-batches, or all of it renumbered."""
        flying = sorted({*self._saved, *self._left})
        if flying and not goes_on:
            raise ShapeError(f"schedule left (chunk, micro-batch) {flying} in flight")
        kept = {number for _, number in flying}
        self._steps = {n - count: x for n, x in self._steps.items() if n in kept}
        self._saved = {(c, n - count): x for (c, n), x in self._saved.items()}
        self._left = {(c, n - count): x for (c, n), x in self._left.items()}
        self._sizes = {(c, n - count): x for (c, n), x in self._sizes.items()}

    def _forward(self, chunk: int, number: int, x: Array, *, keep: bool) -> Any:
        """The loss where the chunk ends the model, else None."""
        if not self.transfer.is_first(chunk):
            x = self._receive("act", number, chunk)
        saved = []
        for index in self.chunks[chunk]:
            self.hooks.forward_begins(index)
            given = x
            x, kept = self.units[index].forward(x, self._steps[number])
            self.hooks.forward_ended(index)
            if keep:
                saved.append(given if index in self.again else kept)
            del kept
            self.transfer.poll()
        if keep:
            self._saved[chunk, number] = saved
            self._note((chunk, number), saved)
        if self.transfer.is_last(chunk):
            return x
        self.transfer.send(x, "act", number, chunk)
        return None

    def _backward(self, chunk: int, number: int, *, weights: bool, last: bool) -> None:
        """Input gradients of a chunk, and its weight gradients or what they need."""
        saved, left, dy = self._saved[chunk, number], [], None
        if not self.transfer.is_last(chunk):
            dy = self._receive("grad", number, chunk)
        for index in reversed(self.chunks[chunk]):
            self.hooks.backward_begins(index)
            kept = saved.pop()
            if index in self.again:
                _, kept = self.units[index].forward(kept, self._steps[number])
                self._note((chunk, number), saved, kept, left)
            dy, rest = self.units[index].backward_input(dy, kept)
            del kept
            self.hooks.backward_ended(index)
            if weights:
                self._add(index, rest, last=last)
            else:
                left.append(rest)
            del rest
            self.transfer.poll()
        del self._saved[chunk, number], self._sizes[chunk, number]
        if not weights:
            self._left[chunk, number] = left
            self._note((chunk, number), left)
        if not self.transfer.is_first(chunk):
            self.transfer.send(dy, "grad", number, chunk)

    def _both(self, chunk: int, number: int, x: Array, step: Step) -> Any:
        """Forward and backward; the loss."""
        self._steps[number] = step
        loss = self._forward(chunk, number, x, keep=True)
        self._backward(chunk, number, weights=True, last=False)
        return loss

    def _conclude(self, chunk: int) -> None:
        """Nothing more is added to the weight gradients of a chunk."""
        for index in reversed(self.chunks[chunk]):
            self.hooks.weight_begins(index)
            self.hooks.weight_ended(index, last=True)
            self.transfer.poll()

    def _weights(self, chunk: int, number: int, *, last: bool) -> None:
        """The weight gradients of a chunk whose input gradients have been made."""
        left = self._left.pop((chunk, number))
        del self._sizes[chunk, number]
        for index in reversed(self.chunks[chunk]):
            self._add(index, left.pop(0), last=last)
            self.transfer.poll()

    def _add(self, index: int, left: Any, *, last: bool) -> None:
        self.hooks.weight_begins(index)
        self.units[index].backward_weight(left)
        self.hooks.weight_ended(index, last=last)

    def _receive(self, kind: str, number: int, chunk: int) -> Array:
        began = time.perf_counter()
        x = self.transfer.receive(kind, number, chunk)
        self._waited += time.perf_counter() - began
        return x

    def _note(self, key: Key, *held: Any) -> None:
        """Takes in what is held now of one micro-batch, beside that of the others."""
        self._sizes[key] = nbytes(*held)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.peak_in_flight = max(self.peak_in_flight, len(self._sizes))
