"""Runs a schedule on paper: how long it takes, what it holds, that it cannot hang."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from mpipar.errors import ConfigError
from mpipar.pipeline.schedules import Action, Schedule

# What an action makes: (F or B, virtual stage, micro-batch).
Product = tuple[str, int, int]


@dataclass(frozen=True)
class Costs:
    """Time of F, B, W and BW, which takes B + W unless said.

    A number is the time of a whole stage, and each of its chunks takes an equal part. A
    sequence gives the time of every virtual stage.
    """

    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 1
    weight: float | Sequence[float] = 1
    both: Sequence[float] | None = None

    def table(self, schedule: Schedule) -> dict[str, list[float]]:
        """Times by kind and virtual stage. Raises ConfigError where one cannot be."""
        table, wrong = {}, []
        for kind, name in (("F", "forward"), ("B", "backward"), ("W", "weight")):
            cost, count = getattr(self, name), schedule.virtual_stages
            if not isinstance(cost, Sequence):
                cost = [cost / schedule.chunks] * count
            if len(cost) != count:
                wrong.append(f"{name} has {len(cost)} times, but needs {count}")
            if not all(0 <= time and isfinite(time) for time in cost):
                wrong.append(f"{name} = {cost} must be finite times of at least 0")
            table[kind] = list(cost)
        if wrong:
            raise ConfigError(wrong, title="the costs")
        both = zip(table["B"], table["W"], strict=True)
        return table | {"BW": self.both or [b + w for b, w in both]}


def costs_of(
    schedule: Schedule, work: Sequence[Mapping[tuple[str, int], tuple[float, int]]]
) -> Costs:
    """Mean times of the actions that stages have run.

    work   of each stage: seconds and number of its actions, by kind and chunk
    """
    table = {k: [0.0] * schedule.virtual_stages for k in ("F", "B", "W", "BW")}
    for stage, spent in enumerate(work):
        for (kind, chunk), (seconds, count) in spent.items():
            table[kind][schedule.virtual(stage, chunk)] = seconds / count
    return Costs(*table.values())


@dataclass(frozen=True)
class Simulation:
    """How a schedule runs. Rows and tuples have one entry for each stage.

    makespan         from the first action to the end of the last
    ideal            work of the busiest stage
    idle             time without work, from 0 to the makespan
    span_idle        the same between the stage's own first and last action
    peak_in_flight   most micro-batches whose activations are held, from F to the end of
                     W or BW, in units of a whole stage: a chunk counts 1/chunks
    starts, ends     of every action
    """

    makespan: float
    ideal: float
    idle: tuple[float, ...]
    span_idle: tuple[float, ...]
    peak_in_flight: tuple[float, ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def bubble(self) -> float:
        """Part of the makespan that is not ideal."""
        return (self.makespan - self.ideal) / self.makespan if self.makespan else 0.0

    @property
    def bubble_ratio(self) -> float:
        """What the makespan adds to the ideal, as a part of the ideal."""
        return (self.makespan - self.ideal) / self.ideal if self.ideal else 0.0


class Messages(NamedTuple):
    """What a stage sends to other stages."""

    activations: int
    gradients: int


def simulate(
    schedule: Schedule, costs: Costs | None = None, latency: float = 0
) -> Simulation:
    """Start every action as early as its stage and what it needs allow.

    costs     1 for each of F, B and W without it
    latency   time of a message from one stage to another; a stage hands on to itself
              in no time

    Raises ConfigError where stages wait for each other for ever.
    """
    table = (costs or Costs()).table(schedule)
    if not (0 <= latency and isfinite(latency)):
        raise ConfigError([f"latency = {latency} must be at least 0"], "the costs")
    starts, ends = _run(schedule, table, latency)
    makespan = max((row[-1] for row in ends if row), default=0)
    busy = [
        sum(end - start for start, end in zip(*rows, strict=True))
        for rows in zip(starts, ends, strict=True)
    ]
    spans = [e[-1] - b[0] if b else 0 for b, e in zip(starts, ends, strict=True)]
    return Simulation(
        makespan=makespan,
        ideal=max(busy),
        idle=tuple(makespan - work for work in busy),
        span_idle=tuple(span - work for span, work in zip(spans, busy, strict=True)),
        peak_in_flight=tuple(_peak(row) / schedule.chunks for row in schedule.actions),
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
    )


def _run(
    schedule: Schedule, table: dict[str, list[float]], latency: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every action. What a stage waits for wakes it."""
    made: dict[Product, tuple[float, int]] = {}
    waiting: dict[Product, list[int]] = {}
    starts: list[list[float]] = [[] for _ in schedule.actions]
    ends: list[list[float]] = [[] for _ in schedule.actions]
    ready = deque(range(schedule.stages))
    virtuals = [
        [schedule.virtual(stage, chunk) for chunk in range(schedule.chunks)]
        for stage in range(schedule.stages)
    ]
    while ready:
        stage = ready.popleft()
        row, clock = schedule.actions[stage], ends[stage][-1] if ends[stage] else 0
        for at in range(len(ends[stage]), len(row)):
            action = row[at]
            virtual = virtuals[stage][action.chunk]
            needs = _needs(action, virtual, schedule.virtual_stages)
            missing = [product for product in needs if product not in made]
            if missing:
                waiting.setdefault(missing[0], []).append(stage)
                break
            for product in needs:
                end, maker = made[product]
                clock = max(clock, end if maker == stage else end + latency)
            starts[stage].append(clock)
            clock += table[action.kind][virtual]
            ends[stage].append(clock)
            if action.kind != "W":
                product = action.kind[0], virtual, action.micro_batch
                made[product] = clock, stage
                ready.extend(waiting.pop(product, ()))
    if waiting:
        raise ConfigError(_stuck(schedule, waiting, ends), title="the schedule")
    return starts, ends


def _needs(action: Action, virtual: int, count: int) -> list[Product]:
    """What must have been made before an action can begin."""
    kind, i, _ = action
    if kind == "F":
        return [("F", virtual - 1, i)] if virtual else []
    if kind == "W":
        return [("B", virtual, i)]
    own, after = ("F", virtual, i), ("B", virtual + 1, i)
    return [own, after] if virtual + 1 < count else [own]


def _stuck(
    schedule: Schedule, waiting: dict[Product, list[int]], ends: list[list[float]]
) -> list[str]:
    """Say for each stage that waits what it waits for."""
    pairs = [(stage, product) for product, them in waiting.items() for stage in them]
    reasons = []
    for stage, (kind, virtual, i) in sorted(pairs):
        action = schedule.actions[stage][len(ends[stage])].text(schedule.chunks)
        maker, chunk = schedule.owner(virtual)
        made = [
            a.text(schedule.chunks)
            for a in schedule.actions[maker]
            if (a.kind[0], a.micro_batch, a.chunk) == (kind, i, chunk)
        ]
        if made:
            reasons.append(
                f"stage {stage} waits for ever: its {action} comes before {made[0]} of "
                f"stage {maker} can be done"
            )
        else:
            what = Action(kind, i, chunk).text(schedule.chunks)
            reasons.append(
                f"stage {stage} cannot do {action}: stage {maker} never does {what}"
            )
    return reasons


def _peak(row: Sequence[Action]) -> int:
    held = peak = 0
    for action in row:
        held += {"F": 1, "B": 0}.get(action.kind, -1)
        peak = max(peak, held)
    return peak


def messages(schedule: Schedule) -> list[Messages]:
    """What each stage sends to other stages."""
    sent = []
    for stage, row in enumerate(schedule.actions):
        kinds = [a.kind[0] for a in row if _receiver(schedule, stage, a) is not None]
        sent.append(Messages(kinds.count("F"), kinds.count("B")))
    return sent


def _receiver(schedule: Schedule, stage: int, action: Action) -> int | None:
    """The other stage that needs what an action makes."""
    if action.kind == "W":
        return None
    step = 1 if action.kind == "F" else -1
    virtual = schedule.virtual(stage, action.chunk) + step
    if not 0 <= virtual < schedule.virtual_stages:
        return None
    owner, _ = schedule.owner(virtual)
    return owner if owner != stage else None


def check_schedule(schedule: Schedule) -> list[str]:
    """Why a schedule cannot run over MPI with sends that do not block; empty if it can.

    Stages must not wait for each other in a circle. Messages of one kind to one virtual
    stage are taken in the order they are sent, so both ends must agree on it.
    """
    orders: dict[tuple[str, int], list[int]] = defaultdict(list)
    for stage, row in enumerate(schedule.actions):
        for action in row:
            virtual = schedule.virtual(stage, action.chunk)
            orders[action.kind[0], virtual].append(action.micro_batch)
    wrong = []
    for low in range(schedule.virtual_stages - 1):
        for kind, what in (("F", "activations"), ("B", "gradients")):
            ends = (low, low + 1) if kind == "F" else (low + 1, low)
            giver, taker = (schedule.owner(end)[0] for end in ends)
            sent, taken = (orders[kind, end] for end in ends)
            if giver != taker and sent != taken:
                wrong.append(
                    f"stage {giver} sends {what} of micro-batches {_list(sent)}, but "
                    f"stage {taker} takes them as {_list(taken)}: keep one order"
                )
    try:
        simulate(schedule)
    except ConfigError as error:
        wrong += error.violations
    return wrong


def _list(numbers: list[int], most: int = 12) -> str:
    return " ".join(map(str, numbers[:most])) + " ..." * (len(numbers) > most)


def proves_no_deadlock(schedule: Schedule, *, synchronous: bool) -> bool:
    """True where every stage comes to its end.

    synchronous   False: sends do not block and receives are posted in the order they
                  are needed in, as the executor does it. True: a stage that sends stays
                  there until the other stage receives, in the order of the actions.
    """
    if not synchronous:
        return not check_schedule(schedule)
    calls = [deque(_calls(schedule, stage)) for stage in range(schedule.stages)]
    ready = deque(range(schedule.stages))
    while ready:
        stage = ready.popleft()
        while calls[stage]:
            other, product = calls[stage][0]
            if not calls[other] or calls[other][0] != (stage, product):
                break
            calls[stage].popleft()
            calls[other].popleft()
            ready.append(other)
    return not any(calls)


def _calls(schedule: Schedule, stage: int) -> Iterator[tuple[int, Product]]:
    """Other stage and product of each receive and send that a stage makes, in order."""
    for action in schedule.actions[stage]:
        virtual = schedule.virtual(stage, action.chunk)
        for product in _needs(action, virtual, schedule.virtual_stages):
            if (giver := schedule.owner(product[1])[0]) != stage:
                yield giver, product
        if (receiver := _receiver(schedule, stage, action)) is not None:
            yield receiver, (action.kind[0], virtual, action.micro_batch)
