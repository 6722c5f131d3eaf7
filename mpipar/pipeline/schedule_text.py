"""Schedules as text: one line of actions for each stage, which a user may write too."""

import re
from collections.abc import Iterator, Sequence

from mpipar.errors import ConfigError
from mpipar.pipeline.schedules import Action, Schedule
from mpipar.pipeline.simulate import check_schedule

_WORD = re.compile(r"(F|BW|B|W)([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_HEADER = re.compile(r"\s*#\s*placement\s*:\s*(.*?)\s*")
# What must stand before an action on the same stage.
_BEFORE = {"B": "F", "W": "B"}
_NAMED = 8


def format_schedule(schedule: Schedule) -> str:
    """Text that `parse_schedule` reads back."""
    lines = [f"# placement: {schedule.placement}"]
    for row in schedule.actions:
        lines.append(" ".join(action.text(schedule.chunks) for action in row))
    return "\n".join(lines) + "\n"


def parse_schedule(text: str, name: str) -> Schedule:
    """Read a schedule. Raises ConfigError with every problem of the text.

    text   a line for each stage, its actions in order with blanks or commas between:
           F0 BW0 on stages of one chunk, F0.1 for chunk 1 of several. What follows a #
           is a comment, but for '# placement: vee' (loop without it).
    """
    placement, rows, wrong = _read(text)
    if not rows and not wrong:
        wrong = ["it has no actions; write a line such as F0 BW0 for each stage"]
    if rows:
        wrong += [*_check_sizes(placement, rows), *_check_rows(rows)]
    if not wrong:
        actions = tuple(tuple(row) for row in rows.values())
        micro_batches, chunks = (
            1 + max(a[part] for a in actions[0]) for part in (1, 2)
        )
        schedule = Schedule(name, placement, actions, micro_batches, chunks)
        wrong = check_schedule(schedule)
    if wrong:
        raise ConfigError(wrong, title=f"the schedule {name}")
    return schedule


def _read(text: str) -> tuple[str, dict[int, list[Action]], list[str]]:
    """Placement, actions by number of line, and what cannot be understood."""
    placement, rows, wrong = "loop", {}, []
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            placement = header[1]
            if placement not in ("loop", "vee"):
                wrong.append(
                    f"line {number}: placement {placement or 'nothing'} must be loop "
                    "or vee"
                )
        words = re.split(r"[\s,]+", line.partition("#")[0])
        for word in filter(None, words):
            if not (match := _WORD.fullmatch(word)):
                wrong.append(
                    f"line {number}: {word} is no action; write F, B, W or BW and the "
                    "number of the micro-batch, such as F0, or F0.1 for its chunk 1"
                )
                continue
            action = Action(match[1], int(match[2]), int(match[3] or 0))
            rows.setdefault(number, []).append(action)
    return placement, rows, wrong


def _check_sizes(placement: str, rows: dict[int, list[Action]]) -> Iterator[str]:
    """Micro-batches and chunks count from 0 without a gap, and fit the placement."""
    for part, what in ((1, "micro-batch"), (2, "chunk")):
        numbers = sorted({action[part] for row in rows.values() for action in row})
        gap = next((i for i, n in enumerate(numbers) if i != n), None)
        if gap is not None:
            yield (
                f"no stage does {what} {gap}, but there is a {what} {numbers[-1]}; "
                "number them 0, 1, 2, ..."
            )
    if placement == "vee" and len(numbers) != 2:
        yield f"placement vee needs 2 chunks on each stage, not {len(numbers)}"


def _check_rows(rows: dict[int, list[Action]]) -> Iterator[str]:
    """Each stage does F, B and W of every micro-batch and chunk, once and in order."""
    pieces = sorted({action[1:] for row in rows.values() for action in row})
    chunks = 1 + max(chunk for _, chunk in pieces)
    for number, row in rows.items():
        there = {(kind, *action[1:]) for action in row for kind in _parts(action)}
        yield from _check_order(f"line {number}", row, there, chunks)
        missing = []
        for piece in pieces:
            lacks = [kind for kind in "FBW" if (kind, *piece) not in there]
            kinds = ["BW" if k == "B" else k for k in lacks if k != "W"] or lacks
            if "B" in lacks and "W" not in lacks:
                kinds[-1] = "B"
            missing += [Action(kind, *piece).text(chunks) for kind in kinds]
        if missing:
            more = f" and {len(missing) - _NAMED} more" * (len(missing) > _NAMED)
            yield (
                f"line {number} lacks {', '.join(missing[:_NAMED])}{more}; each stage "
                "does F and BW, or F, B and W, of all micro-batches and chunks"
            )


def _check_order(
    where: str, row: Sequence[Action], there: set[tuple], chunks: int
) -> Iterator[str]:
    seen = set()
    for action in row:
        text, piece = action.text(chunks), action[1:]
        for kind in _parts(action):
            first = _BEFORE.get(kind)
            earlier = (first, *piece)
            if (kind, *piece) in seen:
                yield f"{where}: {text} does {kind} a second time"
            if first and earlier in there and earlier not in seen:
                yield f"{where}: {text} comes before its {first}"
            seen.add((kind, *piece))


def _parts(action: Action) -> tuple[str, ...]:
    return ("B", "W") if action.kind == "BW" else (action.kind,)
