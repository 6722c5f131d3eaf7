"""mpipar ckpt ls: the checkpoints of a run, or what is in one. No MPI."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.cli.ckpt_output import console, megabytes, plain
from mpipar.cli.json_file import write_json
from mpipar.cli.launch import Launch

if TYPE_CHECKING:
    from rich.table import Table

    from mpipar.checkpoint import Entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a run folder or a checkpoint"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the list here as well"
    )


def run_outside(args: argparse.Namespace, launch: Launch) -> int:
    """Print what is there; return 1 where the one checkpoint asked for is damaged."""
    if not launch.speaks:
        return 0
    from mpipar.checkpoint import look

    found = look(args.path)
    if isinstance(found, list):
        _show_all(found)
        write_json(args.json, {"checkpoints": [entry.as_dict() for entry in found]})
        return 0
    _show_one(found)
    write_json(args.json, {"checkpoint": found.as_dict(arrays=True)})
    return int(bool(found.problem))


def _show_all(entries: Sequence[Entry]) -> None:
    table = _table("folder", "step", "tokens", "size", "saved", "layout", "state")
    for column in (1, 2, 3):
        table.columns[column].justify = "right"
    for entry in entries:
        m = entry.manifest
        tokens, saved, layout = "", "", ""
        if m:
            tokens, saved, layout = f"{m.progress.tokens:,}", m.saved, m.layout
        size, state = megabytes(entry.bytes), entry.problem or "complete"
        row = entry.folder.name, entry.step, tokens, size, saved, layout, state
        _add(table, row, "" if m and not entry.problem else "yellow")
    console().print(table)


def _show_one(entry: Entry) -> None:
    out, m = console(), entry.manifest
    print(f"{plain(entry.folder)}: {plain(entry.problem or 'complete')}")
    if m is None:
        return
    p = m.progress
    facts = _table()
    for row in (
        ("step", f"{p.step:,} ({p.updates:,} updates)"),
        ("data", f"{p.samples:,} samples, {p.tokens:,} tokens"),
        ("run", m.run),
        ("saved", m.saved),
        ("layout", m.layout),
        ("files", f"{len(m.shards)} shards, {megabytes(entry.bytes)} in all"),
        ("kinds", ", ".join(m.kinds)),
    ):
        _add(facts, row)
    arrays = _table("array", "shape", "kinds", "dtype")
    for name, shape in m.arrays.items():
        _add(arrays, (name, shape, " ".join(m.kinds), m.dtype))
    out.print(facts)
    out.print()
    out.print(arrays)


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, show_header=bool(columns), pad_edge=False)


def _add(table: Table, row: Sequence[object], style: str = "") -> None:
    from rich.text import Text

    table.add_row(*(Text(plain(cell)) for cell in row), style=style)
