"""mpipar ckpt reshard: writes a checkpoint anew. No MPI."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpipar.cli.ckpt_output import megabytes, plain
from mpipar.cli.launch import Launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="a checkpoint, or a run folder, whose newest one is taken",
    )
    parser.add_argument(
        "folder", type=Path, metavar="DST", help="a new folder for the checkpoint"
    )
    parser.add_argument(
        "--shards", type=int, default=1, metavar="N", help="files (%(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="type of all numbers (as they are)",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="leave moments out: enough to generate, not to train on",
    )


def run_outside(args: argparse.Namespace, launch: Launch) -> int:
    """Write the checkpoint; return the exit status."""
    if not launch.speaks:
        return 0
    from mpipar.checkpoint import reshard

    done = reshard(
        args.source,
        args.folder,
        shards=args.shards,
        dtype=args.dtype,
        weights_only=args.weights_only,
    )
    print(f"wrote {plain(done.folder)}: {megabytes(done.bytes)}")
    for counts, became in ((done.lost.infinite, "infinite"), (done.lost.zero, "zero")):
        for kind, count in counts.items():
            if count:
                print(f"warning: {count:,} numbers of {kind} became {became}")
    return 0
