"""All parts of the run on this machine's GPU: tests/gpu/run.sh starts it."""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.run import report
from gpu.run.parts import GROUPS, PARTS, Files, Part, run_part
from gpu.run.record import read

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
ROOT_USER = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
# A part that has less is not begun.
LEAST_S = 8.0


def main() -> int:
    """Run the parts, show and write what they found; 1 where a check failed."""
    args = _arguments()
    began = time.monotonic()
    until = began + 60 * args.minutes - args.used
    args.out.mkdir(parents=True, exist_ok=True)
    head = _head(args)
    done: list[dict[str, Any]] = []
    chosen = [part for part in PARTS if {part.group, part.module} & set(args.only)]
    if args.dry_run:
        # Tiny ones of the same kind are all alike.
        chosen = list(
            {(part.module, part.ranks): part for part in chosen[::-1]}.values()
        )
        chosen = chosen[::-1]
    with tempfile.TemporaryDirectory(prefix="mpipar-gpu-") as name:
        scratch = Path(name)
        log = args.out / "log.txt"
        log.write_text("")
        files = Files(scratch / "records.jsonl", scratch, log)
        env = _environment(scratch, dry=args.dry_run)
        for part in chosen:
            seconds = min(_limit(part, args), until - time.monotonic())
            if seconds < LEAST_S:
                head["not_begun"].append(part.name)
                continue
            print(f"{part.name} ...", flush=True)
            done.append(run_part(part, files, env, seconds=seconds, dry=args.dry_run))
            head["seconds"] = time.monotonic() - began + args.used
            report.write(args.out / "results.json", head, done, read(files.records))
        lines = read(files.records)
    report.write(args.out / "results.json", head, done, lines)
    report.show(head, done, lines)
    counts = report.summarize(lines)
    late = [part["name"] for part in done if part["late"]]
    whole = not late and not head["not_begun"]
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"\n{words}; {head['seconds']:.0f} s; see {args.out / 'results.json'}")
    return 0 if whole and counts["failed"] == 0 and counts["passed"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh")
    parser.add_argument("--dry-run", action="store_true", help="tiny, without a GPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups or modules")
    parser.add_argument("--out", type=Path, default=_default_out())
    parser.add_argument("--used", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.only = args.only.split(",")
    known = (*GROUPS, *dict.fromkeys(part.module for part in PARTS))
    if wrong := [word for word in args.only if word not in known]:
        parser.error(f"--only has {', '.join(wrong)}; known are {', '.join(known)}")
    if args.minutes <= 0:
        parser.error(f"--minutes = {args.minutes:g} must be more than 0")
    return args


def _default_out() -> Path:
    name = time.strftime("%Y-%m-%d_%H%M%S")
    return Path(os.environ.get("OUT") or ROOT / "runs" / "gpu" / name)


def _limit(part: Part, args: argparse.Namespace) -> float:
    """Seconds of a part, in proportion to the whole run's where that is longer."""
    # Emulated kernels are slow, and CPUs may be busy.
    return part.seconds * max(3.0 if args.dry_run else 1.0, args.minutes / 8)


def _environment(scratch: Path, *, dry: bool) -> dict[str, str]:
    """What parts run in: tests on the path; in a dry run the emulated CuPy too."""
    env = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1"}
    # Open MPI is told that root and more ranks than cores are meant.
    env |= dict.fromkeys(ROOT_USER, "1")
    env.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    env.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    if dry:
        from gpu.emulator.path import environment

        os.environ.setdefault("CUDA_SHIM_CACHE", str(scratch))
        env |= environment()
    return env


def _head(args: argparse.Namespace) -> dict[str, Any]:
    """What this run is."""
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "dry_run": args.dry_run,
        "only": args.only,
        "minutes": args.minutes,
        "seconds": 0.0,
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "not_begun": [],
    }


def _commit() -> str:
    """The commit of the checkout, marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
