"""mpipar ckpt verify: reads every byte of a checkpoint. No MPI."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.cli.ckpt_output import console, megabytes, plain
from mpipar.cli.json_file import write_json
from mpipar.cli.launch import Launch

if TYPE_CHECKING:
    from mpipar.checkpoint import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a checkpoint, or a run folder, whose newest one is read",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all damages here as well"
    )


def run_outside(args: argparse.Namespace, launch: Launch) -> int:
    """Print all damages; return 1 where there is one."""
    if not launch.speaks:
        return 0
    from mpipar.checkpoint import verify

    verdict = verify(args.path)
    _show(verdict)
    write_json(args.json, verdict.as_dict())
    return int(bool(verdict.damages))


def _show(verdict: Verdict) -> None:
    out = console()
    name, count = plain(verdict.folder), len(verdict.damages)
    if count:
        noun = "damage" if count == 1 else "damages"
        out.print(f"{name} has {count} {noun}:", soft_wrap=True)
    for damage in verdict.damages:
        out.print(f"  - {plain(damage.text)}", soft_wrap=True)
    if not count:
        size = megabytes(verdict.bytes)
        out.print(f"{name} is sound: {verdict.files} files, {size}", soft_wrap=True)
    for stray in verdict.strays:
        text = f"warning: {plain(stray)} does not belong to the checkpoint"
        out.print(text, soft_wrap=True)
