"""Activations and gradients between the stages of a pipeline."""

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from mpipar.errors import ShapeError
from mpipar.ops import Ops
from mpipar.pipeline.schedules import Action, Schedule

Array = Any


class Edge(NamedTuple):
    """What comes to one virtual stage: activations ("act") or gradients ("grad")."""

    kind: str
    virtual: int


class Transfer:
    """Sends and receives of one stage while it runs its actions.

    An edge is a queue: its messages come in the order in which both ends use them. The
    next message of every edge has its receive posted, so that it travels during the
    work before it; an array that is sent is kept until it has left. Two stages that are
    the same rank hand their arrays over.

    pp         communicator of the stages; nobody else sends messages on it
    schedule   tells who has which virtual stage
    Moves      b·s/u·d items for each action that does not begin or end the model;
               u = tp under sequence parallelism, else 1
    """

    def __init__(self, pp: Any, schedule: Schedule, ops: Ops) -> None:
        self.pp, self.schedule, self.ops = pp, schedule, ops
        self._shapes: list[tuple[int, ...]] = []
        self._due: dict[Edge, deque[int]] = {}
        self._posted: dict[Edge, Any] = {}
        self._here: dict[tuple[Edge, int], Array] = {}
        self._leaving: deque[Any] = deque()

    def is_first(self, chunk: int) -> bool:
        """True where a chunk begins the model."""
        return self._virtual(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """True where a chunk ends the model."""
        return self._virtual(chunk) == self.schedule.virtual_stages - 1

    def begin(self, actions: Iterable[Action], shapes: list[tuple[int, ...]]) -> None:
        """Actions are about to run; `shapes` of the stream of each micro-batch."""
        self._shapes = shapes
        self._due.clear()
        for kind, number, chunk in actions:
            if kind == "F" and not self.is_first(chunk):
                self._expect(Edge("act", self._virtual(chunk)), number)
            elif kind in ("B", "BW") and not self.is_last(chunk):
                self._expect(Edge("grad", self._virtual(chunk)), number)
        for edge in self._due:
            self._post(edge)

    def receive(self, kind: str, number: int, chunk: int) -> Array:
        """The input ("act") or output gradient ("grad") of a chunk; the caller's."""
        edge = Edge(kind, self._virtual(chunk))
        if self._is_here(edge):
            return self._here.pop((edge, number))
        due = self._due[edge]
        if due[0] != number:
            raise ShapeError(f"{edge} brings micro-batch {due[0]}, not {number}")
        due.popleft()
        x = self._posted.pop(edge).wait()
        self._post(edge)
        return x

    def send(self, x: Array, kind: str, number: int, chunk: int) -> None:
        """Gives the output ("act") or input gradient ("grad") of a chunk away."""
        edge = Edge(kind, self._virtual(chunk) + (1 if kind == "act" else -1))
        to, _ = self.schedule.owner(edge.virtual)
        if to == self.pp.rank:
            self._here[edge, number] = x
            return
        self._leaving.append((self.pp.send_start(x, to, self._tag(edge)), x))
        self.poll()

    def poll(self) -> None:
        """Lets messages make progress, and forgets arrays that have left."""
        for handle in self._posted.values():
            handle.test()
        while self._leaving and self._leaving[0][0].test():
            self._leaving.popleft()[0].wait()

    def finish(self, *, goes_on: bool = False) -> None:
        """Waits until everything has left, unless others take it in the next run."""
        while self._leaving and not goes_on:
            self._leaving.popleft()[0].wait()
        if self._posted or self._here:
            raise ShapeError("the schedule left messages that nobody used")

    def _virtual(self, chunk: int) -> int:
        return self.schedule.virtual(self.pp.rank, chunk)

    def _source(self, edge: Edge) -> int:
        before = edge.virtual + (-1 if edge.kind == "act" else 1)
        return self.schedule.owner(before)[0]

    def _is_here(self, edge: Edge) -> bool:
        return self._source(edge) == self.pp.rank

    def _expect(self, edge: Edge, number: int) -> None:
        if not self._is_here(edge):
            self._due.setdefault(edge, deque()).append(number)

    def _post(self, edge: Edge) -> None:
        """Posts the receive of the next message of an edge, if there is one."""
        if self._due[edge]:
            x = self.ops.empty(self._shapes[self._due[edge][0]])
            source, tag = self._source(edge), self._tag(edge)
            self._posted[edge] = self.pp.recv_start(x, source, tag)

    def _tag(self, edge: Edge) -> int:
        return edge.virtual + (edge.kind == "grad") * self.schedule.virtual_stages
