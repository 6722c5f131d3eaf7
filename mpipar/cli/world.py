"""Starts MPI for a command, and ends every rank when one of them fails."""

import argparse
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from types import FrameType, ModuleType

from mpipar.cli.device import place_warning
from mpipar.cli.json_file import check_json
from mpipar.cli.launch import (
    FAILED,
    LAST_WORDS_S,
    Launch,
    singleton_message,
    thread_settings,
    thread_warning,
    threads_per_rank,
)
from mpipar.errors import DeviceMemoryError, MpiparError

with warnings.catch_warnings():
    # mpi4py warns of a wrong launcher on every rank; the check below says it once.
    warnings.simplefilter("ignore", RuntimeWarning)
    from mpi4py import MPI


def run_in_world(command: ModuleType, args: argparse.Namespace, launch: Launch) -> int:
    """Check the launch, set the BLAS threads, run the command and guard it.

    A command that has ALONE = True reports on the launch itself and is not refused.
    """
    world = MPI.COMM_WORLD
    reason = singleton_message(launch, world.size, mpi_library())
    if reason and not getattr(command, "ALONE", False):
        if launch.speaks:
            print(f"mpipar: {reason}", file=sys.stderr)
        return 2
    threading.excepthook = lambda hook: _abort(world, hook.exc_value)
    # By default these end one rank without a word, which not every launcher notices.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _interrupt)
    sys.unraisablehook = _abort_at_exit
    try:
        set_threads(world)
        check_json(args, world)
        return command.run(args, world)
    except SystemExit as stop:
        return 0 if stop.code in (None, 0) else _abort(world, stop)
    except BaseException as error:
        if _is_common(error, world):
            return _tell_once(error, world)
        return _abort(world, error)


def _abort_at_exit(found: "sys.UnraisableHookArgs") -> None:
    """An error of an exit handler is one of the run; others go the usual way."""
    at_exit = "atexit callback" in (found.err_msg or "")
    if at_exit and not MPI.Is_finalized():
        _abort(MPI.COMM_WORLD, found.exc_value)
    else:
        sys.__unraisablehook__(found)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _is_common(error: BaseException, world: MPI.Comm) -> bool:
    """True when every rank raises this error, so that nobody waits for this one."""
    alone = world.size == 1 and isinstance(error, MpiparError)
    return alone or getattr(error, "agreed", False)


def _tell_once(error: BaseException, world: MPI.Comm) -> int:
    if world.rank == 0:
        name = "" if isinstance(error, MpiparError) else f"{type(error).__name__}: "
        print(f"mpipar: {name}{error}", file=sys.stderr)
    return getattr(error, "exit_code", FAILED)


def mpi_library() -> str:
    """Name and version of the MPI library, in one line."""
    text = MPI.Get_library_version().partition("\n")[0].partition(",")[0]
    return " ".join(text.replace("Version:", "").strip("\0").split())


def set_threads(world: MPI.Comm) -> None:
    """Share the cores of each node among its ranks' BLAS threads. Collective.

    Must run before NumPy is loaded, which reads the variables once.
    """
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    masks = node.allgather(frozenset(os.sched_getaffinity(0)))
    threads = threads_per_rank(masks, node.rank)
    cores = len(frozenset().union(*masks))
    warning = thread_warning(os.environ, node.size, cores)
    if warning and world.rank == 0:
        print(warning, file=sys.stderr)
    warning = place_warning(os.environ, node.rank)
    if warning:
        print(warning, file=sys.stderr)
    os.environ.update(thread_settings(os.environ, threads))
    node.Free()


def _abort(world: MPI.Comm, error: BaseException | None) -> int:
    """Tell which rank failed and why, then end every rank of the job."""
    if getattr(error, "speaks", True):
        _print_error(world, error)
    else:
        # The launcher ends this rank when the one that speaks has spoken
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(4 * LAST_WORDS_S)
    time.sleep(LAST_WORDS_S)
    world.Abort(FAILED)
    return FAILED


def _print_error(world: MPI.Comm, error: BaseException | None) -> None:
    who = f"[rank {world.rank} of {world.size}, {socket.gethostname()}] "
    if isinstance(error, KeyboardInterrupt):
        lines = ["interrupted"]
    elif isinstance(error, DeviceMemoryError):
        # Where it happened says little: any array may be one too many.
        lines = [str(error)]
    else:
        lines = "".join(traceback.format_exception(error)).splitlines()
    # One write, so that the lines of several ranks do not mix.
    sys.stdout.flush()
    sys.stderr.write("".join(f"{who}{line}\n" for line in lines))
    sys.stderr.flush()
