"""Schedules: pure functions that list, for each stage, what it does in which order.

p  stages, s  one of them, m  micro-batches, v  chunks of the model on each stage. A
generator is called with (p, s, m, v) and lists the actions of stage s; `SCHEDULES`
names them all. To add one, write such a function and enter it there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from mpipar.config.schedules import NEEDS
from mpipar.errors import ConfigError


class Action(NamedTuple):
    """One entry of a schedule, on one micro-batch and one chunk of the stage.

    kind   F forward, B gradient of the input, W gradient of the weights, BW both
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return self.text(chunks=1 + self.chunk)

    def text(self, chunks: int) -> str:
        """BW3, or BW3.0 where the stage has several chunks."""
        return f"{self.kind}{self.micro_batch}" + f".{self.chunk}" * (chunks > 1)


@dataclass(frozen=True)
class Schedule:
    """What every stage does in which order.

    placement       loop: stage s owns the virtual stages s, s + p, s + 2p, ...
                    vee: stage s owns the virtual stages s and 2p - 1 - s
    actions         one row of actions for each stage
    micro_batches   0 .. micro_batches - 1, each seen by every chunk of every stage
    chunks          pieces of the model on each stage
    """

    name: str
    placement: str
    actions: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        return len(self.actions)

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    def virtual(self, stage: int, chunk: int) -> int:
        """Place of a chunk on the way of a micro-batch through the model."""
        if self.placement == "vee" and chunk == 1:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def owner(self, virtual: int) -> tuple[int, int]:
        """Stage and chunk of a virtual stage: the inverse of `virtual`."""
        chunk, stage = divmod(virtual, self.stages)
        if self.placement == "vee" and chunk == 1:
            stage = self.stages - 1 - stage
        return stage, chunk


def single_stage(micro_batches: int) -> list[Action]:
    """F0 BW0 F1 BW1 …: a model that is not cut keeps one micro-batch in flight."""
    return [
        Action(kind, number) for number in range(micro_batches) for kind in ("F", "BW")
    ]


def forward_only(micro_batches: int, chunks: int = 1, group: int = 1) -> list[Action]:
    """F0 F1 …: evaluation. Groups go through chunk after chunk, so that stages have
    something to do while others are at it."""
    return [
        Action("F", number, chunk)
        for start in range(0, micro_batches, group)
        for chunk in range(chunks)
        for number in range(start, min(start + group, micro_batches))
    ]


def naive(p: int, s: int, m: int, v: int) -> list[Action]:
    """One micro-batch at a time: a single stage works, the others wait."""
    return single_stage(m)


def gpipe(p: int, s: int, m: int, v: int) -> list[Action]:
    """All forward, then all backward (Huang et al. 2019). Holds m micro-batches.

    Backward in rising order: it ends at the same time as the falling order of the
    paper, and gradients are summed in the order of one rank, so they keep their bits.
    """
    return _in_turns(*_all(m), warm_up=m)


def one_f_one_b(p: int, s: int, m: int, v: int) -> list[Action]:
    """A forward for each backward (Narayanan et al. 2021). Holds min(p - s, m)."""
    return _in_turns(*_all(m), warm_up=p - 1 - s)


def eager_one_f_one_b(p: int, s: int, m: int, v: int) -> list[Action]:
    """1F1B that starts early enough to hide the way of messages. Holds 2(p - s) - 1."""
    return _in_turns(*_all(m), warm_up=2 * (p - 1 - s))


def interleaved(p: int, s: int, m: int, v: int) -> list[Action]:
    """1F1B over v chunks a stage (Narayanan et al. 2021): 1/v of the bubble.

    Micro-batches go through chunk after chunk in groups: of p where p divides m, else
    in as many groups, larger and as even as they can be. A short last group instead
    costs more time than it saves memory, and deadlocks for some m (p = 8, m = 10).
    """
    count = max(1, m // p)
    ends = [m * i // count for i in range(count + 1)]
    groups = [range(*pair) for pair in zip(ends, ends[1:], strict=False)]
    forwards, backwards = (
        [Action(kind, i, chunk) for group in groups for chunk in order for i in group]
        for kind, order in (("F", range(v)), ("BW", range(v - 1, -1, -1)))
    )
    largest = -(-m // count)
    return _in_turns(forwards, backwards, 2 * (p - 1 - s) + (v - 1) * largest)


def without_break(p: int, s: int, m: int) -> list[Action]:
    """What stage s does for one batch of 2bw, between two others: forward of m micro-
    batches, each followed by the backward that 1F1B has there. Those of the batch
    before have negative numbers, -1 the last."""
    lag = p - 1 - s
    pairs = ((Action("F", i), Action("BW", i - lag)) for i in range(m))
    return [action for pair in pairs for action in pair]


def zb_h1(p: int, s: int, m: int, v: int) -> list[Action]:
    """W fills the end of the pipeline (Qi et al. 2023). Holds min(p, m) everywhere."""
    return _delayed_weights(m, warm_up=p - s, delay=s)


def zb_h2(p: int, s: int, m: int, v: int) -> list[Action]:
    """No stage idles between its first and its last action; holds min(2p - 1, m).

    The stages still begin one after the other: a step that ends on all of them together
    gains over zb_h1 only where the gradients of inputs and of weights differ in cost.
    """
    return _delayed_weights(m, warm_up=2 * (p - s) - 1, delay=2 * s)


def zb_v(p: int, s: int, m: int, v: int) -> list[Action]:
    """Two chunks a stage, on the way out and on the way back (Qi et al. 2024). Holds p.

    Made for 2p - 1 micro-batches or more; those beyond m are then left out.
    """
    n = max(m, 2 * p - 1)
    line = _Line()
    line.add("F0", 2 * (p - s) - 1)
    line.add("F1 F0", s)
    line.add("F1 B1 W1", p - s)
    while line.done["F1"] < n:
        line.add("F0", line.done["F0"] < n)
        line.add("B0 W0 F1 B1 W1")
    line.add("B0 B1", s)
    line.add("B0 W0", p - s)
    line.add("W1", line.left("W1"))
    line.add("W0", line.left("W0"))
    return [action for action in line.actions if action.micro_batch < m]


def dualpipe_v(p: int, s: int, m: int, v: int) -> list[Action]:
    """A forward beside each backward, on two chunks (DeepSeek-AI 2024, cut in half).

    Made to hide messages behind the pairs F BW. Holds p + 1/2.
    """
    after, odd = p - 1 - s, s % 2
    late = (s + 1) // 2
    line = _Line()
    line.add("F0", 2 * after)
    line.add("F0 F1", s + 1)
    line.add("B1 W F1", after)
    line.add("F0 BW1 F1 BW0", m - 2 * p + s + 1)
    line.add("BW1 F1 BW0", after)
    line.add("BW1 BW0", late)
    line.add("B1 B0" if odd else "BW1 B0")
    line.add("B1 B0", s - late)
    line.add("W B0", after)
    line.add("W", line.left("W"))
    return line.actions


def _all(m: int) -> tuple[list[Action], list[Action]]:
    return forward_only(m), [Action("BW", i) for i in range(m)]


def _in_turns(
    forwards: list[Action], backwards: list[Action], warm_up: int
) -> list[Action]:
    """Some forwards, then one backward for each forward, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    rest = backwards[len(forwards) - warm_up :]
    return [*forwards[:warm_up], *(a for pair in pairs for a in pair), *rest]


def _delayed_weights(m: int, warm_up: int, delay: int) -> list[Action]:
    """B and F in turns after the warm-up; W follows `delay` micro-batches behind B."""
    warm_up = min(warm_up, m)
    actions = forward_only(warm_up)
    for i in range(m):
        actions.append(Action("B", i))
        if i >= delay:
            actions.append(Action("W", i - delay))
        if i + warm_up < m:
            actions.append(Action("F", i + warm_up))
    return actions + [Action("W", i) for i in range(max(m - delay, 0), m)]


class _Line:
    """The actions of a stage, written as words; numbers the micro-batches itself.

    F1, B1 and BW1 are the next of chunk 1. W1 follows the oldest B1 that has no W yet,
    and W the oldest B of any chunk.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[str] = Counter()
        self._waiting: list[Action] = []

    def add(self, words: str, times: int = 1) -> None:
        for word in words.split() * times:
            kind = word.rstrip("01")
            if kind == "W":
                before = next(b for b in self._waiting if self._fits(b, word))
                self._waiting.remove(before)
                self.actions.append(before._replace(kind="W"))
                continue
            key = word.replace("W", "")
            self.actions.append(Action(kind, self.done[key], int(word[-1])))
            self.done[key] += 1
            if kind == "B":
                self._waiting.append(self.actions[-1])

    def left(self, word: str) -> int:
        """How often W, W0 or W1 is still to come."""
        return sum(self._fits(b, word) for b in self._waiting)

    @staticmethod
    def _fits(before: Action, word: str) -> bool:
        return word in ("W", f"W{before.chunk}")


@dataclass(frozen=True)
class Family:
    """How a kind of schedule is made; what it needs is in `NEEDS`."""

    generate: Callable[[int, int, int, int], list[Action]]
    placement: str = "loop"


# 2bw is 1F1B that goes on without a break from one batch to the next.
SCHEDULES = {
    "naive": Family(naive),
    "gpipe": Family(gpipe),
    "1f1b": Family(one_f_one_b),
    "1f1b-eager": Family(eager_one_f_one_b),
    "interleaved": Family(interleaved),
    "zb-h1": Family(zb_h1),
    "zb-h2": Family(zb_h2),
    "zb-v": Family(zb_v, "vee"),
    "2bw": Family(one_f_one_b),
    "dualpipe-v": Family(dualpipe_v, "vee"),
}


def requirements(
    name: str, stages: int, micro_batches: int, chunks: int = 0, batches: int = 1
) -> list[str]:
    """Every rule that `make_schedule` would break, each with values that pass."""
    sizes = {"stages": stages, "micro_batches": micro_batches, "batches": batches}
    wrong = [f"{k} = {n} must be at least 1; try 1" for k, n in sizes.items() if n < 1]
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f"; try {near[0]}" if near else ""
        return [f"{name} is none of the schedules {', '.join(SCHEDULES)}{hint}", *wrong]

    needs = NEEDS[name]
    least, most = needs.chunks
    if chunks and (chunks < least or most is not None and chunks > most):
        legal = f"{least} or more" if most is None else f"{least}"
        try_it = least if chunks < least else most
        wrong.append(f"chunks = {chunks} must be {legal} for {name}; try {try_it}")
    if stages > 0 and 1 <= micro_batches < needs.per_stage * stages:
        need = needs.per_stage * stages
        offers = [f"micro_batches = {need}"]
        if fewer := micro_batches // needs.per_stage:
            offers.append(f"stages = {fewer}")
        wrong.append(
            f"micro_batches = {micro_batches} must be at least {need} for {name} on "
            f"{stages} stages; try {' or '.join(offers)}"
        )
    if batches > 1 and name != "2bw":
        wrong.append(
            f"batches = {batches} must be 1 for {name}, since each batch begins anew; "
            "try batches = 1 or 2bw"
        )
    return wrong


def make_schedule(
    name: str, stages: int, micro_batches: int, chunks: int = 0, batches: int = 1
) -> Schedule:
    """The schedule of this name. Raises ConfigError with all that `requirements` finds.

    chunks    pieces of the model on each stage; 0: the fewest that the schedule takes
    batches   for 2bw: batches of so many micro-batches that follow without a break;
              micro-batch i belongs to batch i // micro_batches
    """
    if wrong := requirements(name, stages, micro_batches, chunks, batches):
        raise ConfigError(wrong, title="the schedule")
    family = SCHEDULES[name]
    chunks, total = chunks or NEEDS[name].chunks[0], micro_batches * batches
    rows = (family.generate(stages, s, total, chunks) for s in range(stages))
    return Schedule(name, family.placement, tuple(map(tuple, rows)), total, chunks)
