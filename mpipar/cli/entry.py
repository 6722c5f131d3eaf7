"""The frame around every command: parsing, launch checks, threads, errors.

Nothing here imports NumPy, and MPI is imported only once a command is to run.
"""

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from types import ModuleType

from mpipar.cli.device import bind_device
from mpipar.cli.json_file import check_json
from mpipar.cli.launch import FAILED, LAST_WORDS_S, Launch, read_launch
from mpipar.errors import MpiparError

COMMANDS = {
    "train": "train a recipe",
    "run": "start a training job, and start it again when it fails",
    "verify": "prove that a layout computes what one rank computes",
    "schedule": "draw a pipeline schedule and tell how long it takes",
    "generate": "continue a prompt with a trained model",
    "ckpt ls": "list the checkpoints of a run, or the arrays of one",
    "ckpt verify": "read every byte of a checkpoint and name all damages",
    "ckpt reshard": "write a checkpoint anew, in other files or as another type",
    "doctor": "tell what MPI, cores, disk, GPUs and network are here, what is wrong",
    "bench peers": "time the same training in PyTorch and in mpipar, in turns",
    "bench step": "tell where the time of a training step goes",
    "bench checkpoint": "time saves and loads of a state beside the disk itself",
    "bench context": "time attention over a shared sequence, by method",
    "bench experts": "time a mixture of experts beside dense work, and its layouts",
    "bench collectives": "time sums and gathers, at once and over nodes in turn",
    "bench serve": "make steps when told to, as bench peers asks its workers to",
}
GROUPS = {"ckpt": "list, check and rewrite checkpoints", "bench": "measure speed"}


class _Version(argparse.Action):
    """Print the version; look it up only when asked, since the look-up takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            found = version("mpipar")
        except PackageNotFoundError:
            found = "(not installed)"
        parser.exit(message=f"mpipar {found}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0 done, 1 a check failed, 2 the recipe or the command is wrong, 3 stopped by a
    signal after a save, 4 a rank failed (then the whole MPI job is aborted).
    """
    # Read the launcher's word before MPI starts: some libraries set the same variables.
    launch = read_launch(os.environ)
    args, command = _parse(sys.argv[1:] if argv is None else argv, launch)
    if hasattr(command, "run_outside"):
        return _run_outside(command, args, launch)
    bind_device(os.environ)
    return _load("mpipar.cli.world", launch).run_in_world(command, args, launch)


def _load(name: str, launch: Launch) -> ModuleType:
    """Import a module; an error, even an exit, on one rank ends all of them."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        sys.exit(_end_job(error, launch))


def _run_outside(command: ModuleType, args: argparse.Namespace, launch: Launch) -> int:
    """Run a command that takes no part in an MPI job."""
    try:
        if launch.speaks:
            check_json(args)
        return command.run_outside(args, launch)
    except MpiparError as error:
        if launch.speaks:
            print(f"mpipar: {error}", file=sys.stderr)
        return error.exit_code


def _end_job(error: BaseException, launch: Launch) -> int:
    """Tell of an error that came before MPI was started, and end the other ranks.

    They wait for this one inside MPI's own start.
    """
    who = f"[rank {launch.rank} of {launch.size}] " if launch.size else ""
    lines = "".join(traceback.format_exception(error)).splitlines()
    sys.stderr.write("".join(f"{who}{line}\n" for line in lines))
    sys.stderr.flush()
    if launch.size:
        from mpi4py import MPI

        time.sleep(LAST_WORDS_S)
        MPI.COMM_WORLD.Abort(FAILED)
    return FAILED


def _parse(
    argv: Sequence[str], launch: Launch
) -> tuple[argparse.Namespace, ModuleType | None]:
    parser = argparse.ArgumentParser(
        prog="mpipar", description="Train and run transformers over MPI."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version and leave"
    )
    parsers = _add_commands(parser)

    # Import the asked command only, so that help stays light.
    module = None
    for words in (1, 2):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            module = _load(f"mpipar.cli.{name.replace(' ', '_')}", launch)
            parser, argv = parsers[name], argv[words:]
            module.add_arguments(parser)
            break
    rest: list[str] = []
    if hasattr(module, "TAKES_REST") and "--" in argv:
        place = list(argv).index("--")
        argv, rest = argv[:place], list(argv[place + 1 :])

    # Every rank parses the same words; one of them is enough to answer. Intermixed,
    # so that key=value may stand before and after the options.
    with nullcontext() if launch.speaks else _quiet():
        if module is None:
            parser.parse_args(argv)
        return parser.parse_intermixed_args(argv, argparse.Namespace(rest=rest)), module


def _add_commands(
    parser: argparse.ArgumentParser,
) -> dict[str, argparse.ArgumentParser]:
    """Add a parser for each command, those of a group below that of the group."""
    options = {"required": True, "metavar": "COMMAND"}
    above = {"": parser.add_subparsers(dest="command", **options)}
    parsers = {}
    for name, summary in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in above:
            head = above[""].add_parser(group, **_described(GROUPS[group]))
            above[group] = head.add_subparsers(dest="part", **options)
        parsers[name] = above[group].add_parser(last, **_described(summary))
    return parsers


def _described(summary: str) -> dict[str, str]:
    return {"help": summary, "description": f"{summary[0].upper()}{summary[1:]}."}


@contextmanager
def _quiet() -> Iterator[None]:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield
