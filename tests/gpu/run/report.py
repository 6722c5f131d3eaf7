"""results.json, and the table on the terminal."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def summarize(lines: Sequence[Line]) -> dict[str, int]:
    """How many checks passed, failed and were skipped."""
    names = {True: "passed", False: "failed", None: "skipped"}
    counts = Counter(names[x["passed"]] for x in lines if x["kind"] == "check")
    return {name: counts[name] for name in names.values()}


def write(file: Path, head: Line, parts: Sequence[Line], lines: Sequence[Line]) -> None:
    """The whole run so far as JSON; whole, whenever this is interrupted."""
    kinds = {"fact": "facts", "figure": "figures", "check": "checks"}
    found: dict[str, Any] = {name: [] for name in kinds.values()}
    for line in lines:
        if line["kind"] in kinds:
            own = {key: x for key, x in line.items() if key != "kind"}
            found[kinds[line["kind"]]].append(own)
    facts = {line["name"]: line["value"] for line in found.pop("facts")}
    text = json.dumps(
        head | summarize(lines) | {"facts": facts, "parts": list(parts)} | found,
        indent=1,
    )
    draft = file.with_name(file.name + ".tmp")
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, file)


def show(head: Line, parts: Sequence[Line], lines: Sequence[Line]) -> None:
    """Figures, a line for each part, and every failure in words."""
    print()
    for line in lines:
        if line["kind"] == "figure":
            print(_figure(line))
    print(f"\n{'part':28} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}")
    for part in parts:
        counts = summarize([x for x in lines if x["part"] == part["name"]])
        late = "  out of time" if part["late"] else ""
        numbers = " ".join(f"{counts[key]:7}" for key in counts)
        print(f"{part['name']:28} {numbers} {part['seconds']:8.1f}{late}")
    for text in _reasons(lines):
        print(text)
    for part in head["not_begun"]:
        print(f"NOT RUN {part}: there was no time left")


def _figure(line: Line) -> str:
    value = line["value"]
    text = "-" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    words = f"{line['part']:20} {line['name']:52} {text:>10} {line['unit']}"
    if "of_copy" in line:
        words += f"  ({line['of_copy']:.1%} of a copy)"
    if line["target"] is None:
        return words
    verdict = "reached" if line["reached"] else "MISSED"
    return f"{words}  (target {line['target']:,g}: {verdict})"


def _reasons(lines: Sequence[Line]) -> Iterator[str]:
    """Why checks failed or were skipped, each reason once."""
    for word, wanted in (("skipped", None), ("FAILED", False)):
        told: dict[str, list[str]] = {}
        for x in lines:
            if x["kind"] == "check" and x["passed"] is wanted:
                told.setdefault(f"{x['part']}: {x['error']}", []).append(x["name"])
        for reason, names in told.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"{word} {', '.join(names[:3])}{more}: {reason}"
