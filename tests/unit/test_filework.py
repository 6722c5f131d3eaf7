"""What is noted of work on files, and of processes that do not answer."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

from mpipar.comm import awaited, file_work, moved
from mpipar.comm.filework import held_up
from mpipar.comm.processes import describe, own_process

MAIN = threading.get_ident()


def doing() -> tuple[str, str] | None:
    """What keeps this thread."""
    found = held_up(MAIN)
    return found and (found[0].verb, str(found[0].path))


def test_the_innermost_work_is_told_and_time_counts_from_the_last_move() -> None:
    assert doing() is None
    with file_work("saving", "a"):
        _, begun = held_up(MAIN)
        with file_work("writing", "b"):
            assert doing() == ("writing", "b")
            first = held_up(MAIN)[1]
            moved()
            assert held_up(MAIN)[1] > first > begun
        assert doing() == ("saving", "a") and held_up(MAIN)[1] > first
    assert doing() is None
    moved()


def test_an_error_ends_a_note() -> None:
    try:
        with file_work("writing", "a"):
            raise OSError
    except OSError:
        assert doing() is None


def test_a_generator_may_be_closed_late() -> None:
    def lines() -> Iterator[int]:
        with file_work("reading", "a"):
            yield 1

    with file_work("listing", "b"):
        open_one = lines()
        next(open_one)
        assert doing() == ("reading", "a")
    assert doing() == ("reading", "a")
    open_one.close()
    assert doing() is None


def test_other_threads_count_only_while_they_are_waited_for() -> None:
    begun, go = threading.Event(), threading.Event()

    def save() -> None:
        with file_work("flushing", "shard"):
            begun.set()
            go.wait()

    thread = threading.Thread(target=save)
    thread.start()
    begun.wait()
    assert doing() is None
    before = time.perf_counter()
    with awaited(), awaited():
        work, since = held_up(MAIN)
        assert (work.verb, work.thread) == ("flushing", thread.ident)
        # Patience begins with the wait, however long the work has taken
        assert since > before > work.since
    assert doing() is None
    go.set()
    thread.join()


def test_a_silent_process_is_told_stopped_from_dead() -> None:
    child = subprocess.Popen(["sleep", "60"])
    own = own_process()
    with open(f"/proc/{child.pid}/stat") as stat:
        started = stat.read().rpartition(")")[2].split()[19]
    process = own._replace(pid=child.pid, started=started)
    name = f"process {child.pid} on host {own.host}"
    assert describe(process, own) == name
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert describe(process, own) == f"{name} is stopped by a signal"
    # Another process of that number, or another machine
    assert describe(process._replace(started="1"), own) == f"{name} has died"
    assert describe(process._replace(realm="elsewhere"), own) == name
    child.kill()
    child.wait()
    assert describe(process, own) == f"{name} has died"
