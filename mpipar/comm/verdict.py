"""What the answers of the other ranks mean, and how the report says it."""

from collections.abc import Mapping
from typing import NamedTuple

from mpipar.comm.calls import COLLECTIVE, Call


class Answer(NamedTuple):
    """What a rank says of itself when asked about one call of another rank.

    count     how many operations of that channel it has entered
    op        its operation with the asked number
    last      number and name of its last collective on that axis
    inside    (axis, channel, op, number) it is inside of, None while it computes
    """

    host: str
    where: str
    count: int
    op: str | None
    last: tuple[int, str] | None
    inside: tuple[str, str, str, int] | None
    inside_s: float


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
    call: Call, answers: Mapping[int, Answer], rank: int, where: str, waited_s: float
) -> str:
    """The whole report of ``rank``, which waits in ``call`` at line ``where``."""
    here = sorted([rank, *arrived(call, answers)])
    lines = [
        f"mpipar: rank {rank} has waited {waited_s:.1f} s in {_name(call)} at {where}.",
        f"  arrived: {_ranks(here)}",
    ]
    missing = [member for member in sorted(call.members) if member not in here]
    for member in missing:
        excuse = _excuse(call, answers, member)
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
    lines.append("  The job ends now, with exit status 4.")
    return "\n".join(lines) + "\n"


def _name(call: Call) -> str:
    ends = "" if call.channel == COLLECTIVE else f" ({call.channel})"
    return f"{call.op} #{call.sequence} on axis {call.axis}{ends}, {call.nbytes} bytes,"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _excuse(call: Call, answers: Mapping[int, Answer], member: int) -> str:
    if member not in answers:
        return "no answer: stopped, dead or out of reach"
    answer = answers[member]
    if answer.count >= call.sequence:
        doing = f"mismatch, it called {answer.op} #{call.sequence} on axis {call.axis}"
    elif answer.inside is None:
        doing = "it is computing"
    else:
        axis, channel, op, sequence = answer.inside
        doing = f"it is inside {op} #{sequence} on axis {axis}"
        if (axis, channel) == (call.axis, COLLECTIVE):
            doing = f"mismatch, {doing}"
        if channel != COLLECTIVE:
            doing += f" ({channel})"
        doing += f" since {answer.inside_s:.1f} s"
    last = "none" if answer.last is None else f"{answer.last[1]} #{answer.last[0]}"
    return (
        f"{doing} at {answer.where} on host {answer.host}; "
        f"its last collective on axis {call.axis}: {last}"
    )
