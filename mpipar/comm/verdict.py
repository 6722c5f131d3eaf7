"""What the answers of the other ranks mean, and how the report says it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mpipar.comm.calls import COLLECTIVE, Call

_LISTED = 8  # ranks that a report on files describes one by one
_END = "  The job ends now, with exit status 4."


class Held(NamedTuple):
    """What a rank does with a file, and for how long it has made no progress."""

    verb: str
    path: str
    where: str
    seconds: float

    def __str__(self) -> str:
        return f"blocked in {self.verb} {self.path} for {self.seconds:.1f} s"


class Answer(NamedTuple):
    """What a rank says of itself when asked about one call of another rank.

    count     how many operations of that channel it has entered
    op        its operation with the asked number
    last      number and name of its last collective on that axis
    inside    (axis, channel, op, number) it is inside of, None while it computes
    partners  members of that operation, where they are not many
    held      what it does with a file, or what it waits for another thread to do
    """

    host: str
    where: str
    count: int
    op: str | None
    last: tuple[int, str] | None
    inside: tuple[str, str, str, int] | None
    inside_s: float
    partners: Sequence[int] = ()
    held: Held | None = None


def has_come(call: Call, answer: Answer) -> bool:
    """True if the rank has entered the same operation under the same number."""
    if answer.count < call.sequence:
        return False
    return call.channel != COLLECTIVE or answer.op in (call.op, None)


def arrived(call: Call, answers: Mapping[int, Answer]) -> list[int]:
    """Ranks that have come, the asking one not among them."""
    return sorted(rank for rank, a in answers.items() if has_come(call, a))


def waits_here(call: Call, answer: Answer) -> bool:
    """True if the rank has come, or waits in another operation of this sequence."""
    inside = answer.inside
    here = inside is not None and tuple(inside[:2]) == (call.axis, call.channel)
    return here or has_come(call, answer)


def waits_elsewhere(call: Call, answer: Answer) -> bool:
    """True if the rank itself waits for others, in another sequence of operations."""
    if answer.inside is None or answer.inside_s < 1:
        return False
    return tuple(answer.inside[:2]) != (call.axis, call.channel)


def report(
    call: Call,
    answers: Mapping[int, Answer],
    rank: int,
    where: str,
    waited_s: float,
    process: Callable[[int], str],
    entered: Callable[[str, str], int],
) -> str:
    """The whole report of ``rank``, which waits in ``call`` at line ``where``.

    process   describes the process of a rank that does not answer
    entered   how many operations of an axis and channel ``rank`` has entered
    """
    here = sorted([rank, *arrived(call, answers)])
    lines = [
        f"mpipar: rank {rank} has waited {waited_s:.1f} s in {_name(call)} at {where}.",
        f"  arrived: {_ranks(here)}",
    ]
    missing = [member for member in sorted(call.members) if member not in here]
    for member in missing:
        if member in answers:
            answer = answers[member]
            excuse = _excuse(call, answer)
            if (
                rank in answer.partners
                and entered(*answer.inside[:2]) < answer.inside[3]
            ):
                excuse += f"; it waits for rank {rank} itself"
        else:
            excuse = f"no answer: stopped, dead or out of reach ({process(member)})"
        lines.append(f"  rank {member} did not arrive: {excuse}")
    if not missing:
        lines.append("  all ranks arrived, but the data does not get through")
        # MPI moves what a rank has started only while the rank is inside MPI
        lines += [
            f"  rank {member} has started it, but is computing at {answer.where} on "
            f"host {answer.host}"
            for member, answer in sorted(answers.items())
            if answer.inside is None
        ]
    return "\n".join([*lines, _END]) + "\n"


def report_on_file(
    held: Held, answers: Mapping[int, Answer], rank: int, host: str
) -> str:
    """The whole report of ``rank``, which a file holds up; nobody else knows more."""
    lines = [f"mpipar: rank {rank} on host {host} is {held} at {held.where}."]
    for member, answer in sorted(answers.items())[:_LISTED]:
        doing = answer.held or (answer.inside and _inside(answer)) or "computing"
        line = answer.held.where if answer.held else answer.where
        lines.append(f"  rank {member} on host {answer.host} is {doing} at {line}")
    if len(answers) > _LISTED:
        lines.append(f"  and so on, {len(answers) + 1} ranks have answered")
    return "\n".join([*lines, _END]) + "\n"


def _name(call: Call) -> str:
    name = f"{call.op} #{call.sequence} on axis {call.axis}{_ends(call.channel)}"
    return f"{name}, {call.nbytes} bytes,"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _inside(answer: Answer) -> str:
    """Which operation a rank is inside of."""
    axis, channel, op, sequence = answer.inside
    name = f"{op} #{sequence} on axis {axis}{_ends(channel)}"
    return f"inside {name} since {answer.inside_s:.1f} s"


def _ends(channel: str) -> str:
    """The two ranks of a message."""
    return "" if channel == COLLECTIVE else f" ({channel})"


def _excuse(call: Call, answer: Answer) -> str:
    where = answer.where
    if answer.count >= call.sequence:
        doing = f"mismatch, it called {answer.op} #{call.sequence} on axis {call.axis}"
    elif answer.inside is not None:
        doing = f"it is {_inside(answer)}"
        if tuple(answer.inside[:2]) == (call.axis, COLLECTIVE):
            doing = f"mismatch, {doing}"
    elif answer.held is not None:
        doing, where = f"it is {answer.held}", answer.held.where
    else:
        doing = "it is computing"
    last = "none" if answer.last is None else f"{answer.last[1]} #{answer.last[0]}"
    return (
        f"{doing} at {where} on host {answer.host}; "
        f"its last collective on axis {call.axis}: {last}"
    )
