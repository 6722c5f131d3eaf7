"""Jobs that would hang end with one report that names who did not come, and where."""

import re
import sys

import pytest

START = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
from mpipar.grid import Grid
x = np.ones(256)
grid = Grid(MPI.COMM_WORLD, {sizes}, timeout_s={timeout})
r = grid.rank
print("up", flush=True)
"""
COMPUTE = """
def compute_for_ever():
    while True:
        sum(range(1000))
"""


@pytest.fixture
def hang(job, tmp_path):
    """Run a program on n ranks; return the one report it must end with."""

    def run(n, body, sizes=None, timeout=1.5):
        file = tmp_path / "program.py"
        start = START.format(sizes=sizes or {"tp": n}, timeout=timeout)
        file.write_text(start + COMPUTE + body)
        done = job(n, sys.executable, str(file), timeout=30)
        assert not done.late and not done.left, done.output
        assert done.status != 0
        assert done.output.count("mpipar: rank") == 1, done.output
        assert done.seconds < 25
        report = done.output[done.output.index("mpipar: rank") :]
        return report.partition("exit status 4.")[0]

    return run


def line_of(report):
    """What the source line named in the report's first line says."""
    file, number = re.search(r" at (\S+):(\d+)\.\n", report).groups()
    with open(file) as source:
        return source.read().split("\n")[int(number) - 1]


@pytest.mark.mpi(2)
def test_strange_datagrams_change_nothing(comm):
    """Without the token, not JSON, or JSON of another form."""
    import json
    import socket

    import numpy as np

    from mpipar.grid import Grid

    with Grid(comm, {"tp": 2}, timeout_s=60) as grid:
        dog = grid._watchdog
        right = {"token": dog._token, "to": dog._rank}
        strange = [
            b"\x80\x04.", b"[]", b"3", b"{}", b'{"token": "guess", "to": 0}',
            json.dumps(right).encode(),
            json.dumps(right | {"kind": "ask", "axis": []}).encode(),
            json.dumps(right | {"kind": "tell", "case": 1, "answer": {}}).encode(),
        ]  # fmt: skip
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for data in strange:
                sender.sendto(data, ("127.0.0.1", dog._port))
        grid.tp.all_reduce(np.ones(2))
        assert dog._thread.is_alive()


def test_noting_a_call_costs_little():
    """Two Python calls and one into C: the watchdog's share of an operation."""
    import sys

    from mpipar.comm.calls import COLLECTIVE, CallLog

    log, calls = CallLog(), []
    channel = log.channel("tp", COLLECTIVE, range(2))
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    log.current = channel.enter("all_reduce", 8, 0.0)
    log.current = None
    sys.setprofile(None)
    assert calls.count("call") == 2 and calls.count("c_call") <= 2, calls


def test_a_rank_that_computes_for_ever_is_named(hang):
    """A24"""
    report = hang(
        3,
        """
grid.tp.all_reduce(x)
if r == 1:
    compute_for_ever()
grid.tp.all_gather(x)
""",
    )
    assert re.match(r"mpipar: rank 0 has waited \d+\.\d s in all_gather #2 on ", report)
    assert "on axis tp, 2048 bytes, at " in report
    assert line_of(report) == "grid.tp.all_gather(x)"
    assert "arrived: ranks 0, 2\n" in report
    (missing,) = re.findall(r"rank 1 did not arrive: .*", report)
    assert "it is computing at " in missing and " on host " in missing
    assert "last collective on axis tp: all_reduce #1" in missing


@pytest.mark.parametrize(
    ("started", "excuse"),
    [
        (False, "rank 1 did not arrive: it is computing at "),
        (True, "rank 1 has started it, but is computing at "),
    ],
)
def test_a_rank_that_misses_work_on_shared_arrays_is_named(hang, started, excuse):
    report = hang(
        3,
        f"""
x = grid.tp.shared_zeros(1 << 17, "f8")
if r == 1 and not {started}:
    compute_for_ever()
handle = grid.tp.all_reduce_start(x)
if r == 1:
    compute_for_ever()
handle.wait()
""",
    )
    assert re.match(r"mpipar: rank 0 has waited \d+\.\d s in all_reduce #2 on ", report)
    assert line_of(report) == "handle.wait()"
    assert excuse in report


def test_a_stopped_rank_is_named(hang):
    """A24: SIGSTOP"""
    report = hang(
        3,
        """
grid.tp.barrier()
if r == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
grid.tp.broadcast(x, root=1)
grid.tp.barrier()
""",
    )
    assert report.startswith("mpipar: rank 1 has waited")
    assert "rank 0 did not arrive: no answer: stopped, dead or out of reach" in report


def test_a_rank_in_another_collective_is_named(hang):
    """A25"""
    report = hang(
        2,
        """
grid.tp.barrier()
if r == 0:
    grid.tp.all_reduce(x)
    grid.tp.barrier()
else:
    grid.tp.all_gather(np.ones(10 ** 6))
    grid.tp.barrier()
""",
    )
    assert "mismatch" in report
    assert "all_reduce" in report and "all_gather" in report


def test_a_rank_that_skips_a_collective_is_named(hang):
    """A25: saving under "if rank 0"."""
    report = hang(
        2,
        """
if r == 0:
    grid.dp.all_reduce(x)
grid.dp.barrier()
if r == 1:
    compute_for_ever()
grid.dp.barrier()
""",
        sizes={"dp": 2},
    )
    # Where MPI lets the first pair of calls pass, rank 0 waits in the next one
    assert "on axis dp" in report and re.search("rank [01] did not arrive", report)


def test_the_rank_that_waits_for_the_culprit_speaks_and_not_those_behind_it(hang):
    """Rank 3 computes, 1 waits for it on dp, and 0 waits for 1 on tp."""
    report = hang(
        4,
        """
if r == 3:
    compute_for_ever()
if r == 1:
    grid.dp.all_reduce(x)
if r != 2:
    grid.tp.all_reduce(x)
else:
    time.sleep(60)
""",
        sizes={"tp": 2, "dp": 2},
    )
    assert report.startswith("mpipar: rank 1 has waited") and "on axis dp" in report
    assert "rank 3 did not arrive: it is computing" in report


def test_a_missing_message_is_named_with_its_ends(hang):
    report = hang(
        2,
        """
if r == 0:
    grid.pp.recv(x, source=1, tag=7)
compute_for_ever()
""",
        sizes={"pp": 2},
    )
    assert "in recv #1 on axis pp (rank 1 to 0, tag 7), 2048 bytes, at" in report
    assert "rank 1 did not arrive: it is computing" in report


def test_ranks_that_wait_for_each_other_make_one_report(hang):
    report = hang(
        2,
        "grid.pp.recv(x, source=1 - r)\n",
        sizes={"pp": 2},
    )
    assert "did not arrive: it is inside recv #1 on axis pp" in report


def test_a_started_operation_is_watched_while_it_is_waited_for(hang):
    report = hang(
        2,
        """
if r == 0:
    handle = grid.tp.all_reduce_start(x)
    handle.wait()
compute_for_ever()
""",
    )
    assert "in all_reduce #1 on axis tp" in report
    assert line_of(report) == "    handle.wait()"


def test_slow_steps_within_the_patience_and_the_end_are_not_disturbed(job, tmp_path):
    file = tmp_path / "program.py"
    body = """
for _ in range(3):
    time.sleep(0.6 * (r == 1))
    grid.tp.all_reduce(x)
time.sleep(2.5)
grid.tp.barrier()
threads = threading.active_count()
grid.close()
assert threading.active_count() == threads - 1
if r == 0:
    print("done", flush=True)
"""
    file.write_text(START.format(sizes={"tp": 2}, timeout=2) + body)
    done = job(2, sys.executable, str(file), timeout=30)
    assert done.status == 0 and "done" in done.output and not done.left
    assert "mpipar: rank" not in done.output


def test_a_grid_left_open_does_not_keep_the_process(job, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(START.format(sizes={"tp": 2}, timeout=60) + "grid.tp.barrier()\n")
    done = job(2, sys.executable, str(file), timeout=30)
    assert done.status == 0 and not done.left


def test_a_call_that_a_device_does_not_finish_is_named(hang):
    """The host waits for a stream behind it, outside of any call that it notes."""
    report = hang(
        2,
        """
class Event:
    done = property(lambda self: self.finished)
    def __init__(self, finished):
        self.finished = finished

def enqueue(finished):
    call = grid.tp._collectives.enter("all_reduce", 8, time.perf_counter())
    grid._log.queue(call, Event(finished))

enqueue(finished=True)
if r == 0:
    enqueue(finished=False)
    time.sleep(60)  # in cudaStreamSynchronize
else:
    compute_for_ever()
""",
    )
    assert "in all_reduce #2 on axis tp" in report
    assert "rank 1 did not arrive: it is computing" in report
