"""mpipar schedule: draws a pipeline schedule and tells how long it takes. No MPI."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipar.cli.launch import Launch
from mpipar.errors import ConfigError

if TYPE_CHECKING:
    from mpipar.pipeline.schedules import Schedule
    from mpipar.pipeline.simulate import Costs, Simulation

# Characters of a line where the output is no terminal.
_WIDE = 1000
_COLOURS = {"F": "#4c9be8", "B": "#f2a33c", "W": "#6cbf6c", "BW": "#e2785a"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "name", metavar="NAME_OR_FILE", help="a schedule such as 1f1b, or a text file"
    )
    for option, letter, what in (
        ("stages", "P", "stages of the pipeline"),
        ("micro-batches", "M", "micro-batches of a batch"),
        ("chunks", "V", "chunks of the model on each stage (default: the fewest)"),
        ("batches", "N", "for 2bw: batches without a break between (default: 1)"),
    ):
        parser.add_argument(f"--{option}", type=int, metavar=letter, help=what)
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,B,W",
        help="time of forward, gradient of inputs, gradient of weights on one stage "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--latency",
        type=float,
        default=0.0,
        metavar="C",
        help="time of a message between stages (default: 0)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers here as well"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="write the actions here, to be changed and given as parallel.schedule",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture here")


def run_outside(args: argparse.Namespace, launch: Launch) -> int:
    """Simulate and print; under a launcher one process does so for all."""
    from mpipar.pipeline.schedule_text import format_schedule
    from mpipar.pipeline.simulate import simulate

    schedule, costs = _understand(args)
    simulation = simulate(schedule, costs, args.latency)
    if launch.speaks:
        _show(schedule, simulation)
        if args.json:
            numbers = _numbers(schedule, simulation).items()
            lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in numbers)
            text = ",\n".join(lines)
            _write("--json", args.json, f"{{\n{text}\n}}\n".encode())
        if args.text:
            _write("--text", args.text, format_schedule(schedule).encode())
        if args.png:
            _write("--png", args.png, _picture(schedule, simulation))
    return 0


def _understand(args: argparse.Namespace) -> tuple[Schedule, Costs]:
    """The schedule and the costs. Raises ConfigError with all that is wrong."""
    wrong, schedule, costs = [], None, None
    try:
        schedule = _schedule(args)
    except ConfigError as error:
        wrong += error.violations
    try:
        costs = _costs(args.costs)
        if schedule:
            costs.table(schedule)
    except ConfigError as error:
        wrong += error.violations
    if not 0 <= args.latency < float("inf"):
        wrong.append(f"--latency {args.latency:g} must be a time of at least 0; try 0")
    if wrong:
        raise ConfigError(wrong, "the command")
    return schedule, costs


def _costs(text: str) -> Costs:
    from mpipar.pipeline.simulate import Costs

    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = []
    if len(times) != 3 or not all(0 <= time < float("inf") for time in times):
        reason = f"--costs {text} must be three times of at least 0; try 1,1,1"
        raise ConfigError([reason], "the command")
    return Costs(*times)


def _schedule(args: argparse.Namespace) -> Schedule:
    from mpipar.pipeline.schedules import SCHEDULES, make_schedule

    path = Path(args.name)
    if args.name not in SCHEDULES and path.exists():
        return _from_file(args, path)
    missing = [
        f"--{option} is missing; try --{option} {example}"
        for option, example in (("stages", 4), ("micro-batches", 8))
        if getattr(args, option.replace("-", "_")) is None
    ]
    # Judge the rest with sizes that suit every schedule.
    stages = 4 if args.stages is None else args.stages
    micro_batches = args.micro_batches
    if micro_batches is None:
        micro_batches = 2 * max(stages, 1)
    chunks = 0 if args.chunks is None else args.chunks
    batches = 1 if args.batches is None else args.batches
    wrong = [] if args.chunks != 0 else ["--chunks 0 must be at least 1; try 1"]
    try:
        schedule = make_schedule(args.name, stages, micro_batches, chunks, batches)
    except ConfigError as error:
        wrong += error.violations
        if args.name not in SCHEDULES:
            wrong.append(f"{args.name} is no file either; try the path of one that is")
    if missing or wrong:
        raise ConfigError([*missing, *wrong], "the command")
    return schedule


def _from_file(args: argparse.Namespace, path: Path) -> Schedule:
    """Read the file; sizes may be left out, but must not say something else."""
    from mpipar.pipeline.schedule_text import parse_schedule

    try:
        schedule = parse_schedule(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"], "the command") from None
    except ConfigError as error:
        reasons = [f"{path}: {reason}" for reason in error.violations]
        raise ConfigError(reasons, "the command") from None
    wrong = [
        f"--{option} {asked} differs from the {found} of {path}; leave it out"
        for option, asked, found in (
            ("stages", args.stages, schedule.stages),
            ("micro-batches", args.micro_batches, schedule.micro_batches),
            ("chunks", args.chunks, schedule.chunks),
            ("batches", args.batches, 1),
        )
        if asked not in (None, found)
    ]
    if wrong:
        raise ConfigError(wrong, "the command")
    return schedule


def _numbers(schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    from mpipar.pipeline.simulate import messages

    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "chunks": schedule.chunks,
        "placement": schedule.placement,
        "makespan": simulation.makespan,
        "ideal": simulation.ideal,
        "bubble": simulation.bubble,
        "bubble_ratio": simulation.bubble_ratio,
        "idle": simulation.idle,
        "span_idle": simulation.span_idle,
        "peak_in_flight": simulation.peak_in_flight,
        "messages": [sent._asdict() for sent in messages(schedule)],
        "actions": [[a.text(schedule.chunks) for a in r] for r in schedule.actions],
        "starts": simulation.starts,
        "ends": simulation.ends,
    }


def _show(schedule: Schedule, simulation: Simulation) -> None:
    from mpipar.pipeline.chart import chart
    from mpipar.pipeline.simulate import messages

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    print(
        f"{schedule.name}: stages {schedule.stages}, micro-batches "
        f"{schedule.micro_batches}, chunks per stage {schedule.chunks}\n\n"
        f"{chart(schedule, simulation, width)}\n\n"
        f"makespan  {simulation.makespan:g}\n"
        f"ideal     {simulation.ideal:g}\n"
        f"bubble    {simulation.bubble:.4g} of the makespan, "
        f"{simulation.bubble_ratio:.4g} of the ideal\n"
    )
    columns = "idle", "span idle", "peak in flight", "sends activations", "gradients"
    print("  ".join(("stage", *columns)))
    for stage, sent in enumerate(messages(schedule)):
        values = (
            simulation.idle[stage],
            simulation.span_idle[stage],
            simulation.peak_in_flight[stage],
            *sent,
        )
        cells = (f"{v:>{len(c)}g}" for v, c in zip(values, columns, strict=True))
        print("  ".join((f"{stage:>5}", *cells)))


def _picture(schedule: Schedule, simulation: Simulation) -> bytes:
    """A bar for each action over time, a row for each stage, as a PNG."""
    from io import BytesIO

    try:
        from matplotlib.figure import Figure
    except ImportError:
        reason = '--png needs matplotlib; try pip install "mpipar[report]"'
        raise ConfigError([reason], "the command") from None

    count = max(len(row) for row in schedule.actions)
    width = min(4 + 0.3 * count, 40)
    figure = Figure(figsize=(width, 1.2 + 0.4 * schedule.stages), layout="constrained")
    axes = figure.add_subplot()
    for kind, colour in _COLOURS.items():
        label = kind
        for stage, row in enumerate(schedule.actions):
            ends = simulation.ends[stage]
            for chunk in range(schedule.chunks):
                times = zip(row, simulation.starts[stage], ends, strict=True)
                bars = [(b, e - b) for a, b, e in times if a[::2] == (kind, chunk)]
                # Later chunks are paler.
                look = {"facecolor": colour, "alpha": 1 - 0.6 * chunk / schedule.chunks}
                if bars:
                    at = stage - 0.4, 0.8
                    axes.broken_barh(bars, at, edgecolor="white", label=label, **look)
                    label = None
    if count <= 120:
        for stage, row in enumerate(schedule.actions):
            ends = simulation.ends[stage]
            for action, b, e in zip(row, simulation.starts[stage], ends, strict=True):
                at = (b + e) / 2, stage
                axes.annotate(action.micro_batch, at, ha="center", va="center", size=7)
    axes.set(xlabel="time", ylabel="stage", yticks=range(schedule.stages))
    axes.set(title=schedule.name, xlim=(0, simulation.makespan or 1))
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    found = BytesIO()
    figure.savefig(found, format="png", dpi=120)
    return found.getvalue()


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        reason = f"cannot write {option} {path}: {error}"
        raise ConfigError([reason], "the command") from None
