"""Debug mode: a call that differs among ranks is an error of all, not a hang."""

import re

import numpy as np
import pytest

from mpipar.comm.checked import CheckedCommunicator
from mpipar.comm.counters import Counters
from mpipar.errors import CommError

# MPI may still read and write what is left over
LEFT = []


@pytest.fixture
def spoilt(comm):
    """All ranks as a checked axis, whose messages may be left over when it ends.

    It is never freed: MPI may give the next communicator what comes late for this one.
    """
    from mpipar.comm.calls import CallLog

    return CheckedCommunicator(comm.Dup(), "tp", Counters(), log=CallLog())


@pytest.fixture
def tp(spoilt):
    """The same, when nothing is left over."""
    yield spoilt
    spoilt.free()


def here(what: str) -> str:
    """The line of a rank in the message, a line of this file."""
    return rf"{what} at \S+/test_comm_checked\.py:\d+"


def fails(call, reason: str, *lines: str) -> None:
    """The call raises CommError with these lines, and one rank tells it."""
    with pytest.raises(CommError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"the ranks of axis tp {reason}"), message
    for line in lines:
        assert re.search(line, message), message


CALLS = {
    "op": (
        lambda tp: tp.all_reduce(np.ones(3), "max" if tp.rank else "sum"),
        (r"rank 0: all_reduce #1 \(sum of 3 float64\)", r"rank 1: .*max of 3 float64"),
    ),
    "count": (
        lambda tp: tp.all_reduce(np.ones(3 + tp.rank)),
        ("sum of 3 float64", "sum of 4 float64"),
    ),
    "dtype": (
        lambda tp: tp.all_gather(np.ones(3, f"f{4 + 4 * tp.rank}")),
        (r"\(3,\) float32", r"\(3,\) float64"),
    ),
    "counts": (
        lambda tp: tp.all_gather(np.ones(1), [1, 1 + tp.rank]),
        (r"\[1, 1\]", r"\[1, 2\]"),
    ),
    "rows": (
        lambda tp: tp.reduce_scatter(np.ones((4, 1 + tp.rank))),
        (r"\(4, 1\) float64", r"\(4, 2\) float64"),
    ),
    "root": (
        lambda tp: tp.broadcast(np.ones(2), root=tp.rank),
        ("2 float64 from rank 0", "2 float64 from rank 1"),
    ),
    "object": (
        lambda tp: tp.broadcast_obj(1, root=tp.rank),
        ("from rank 0", "from rank 1"),
    ),
    "another": (
        lambda tp: tp.barrier() if tp.rank else tp.all_reduce(np.ones(1)),
        ("rank 0: all_reduce", here("rank 1: barrier #1")),
    ),
    "start": (
        lambda tp: tp.all_to_all_start(np.ones((2, 2 + tp.rank))),
        (r"\(2, 2\) float64", r"\(2, 3\) float64"),
    ),
    "memory": (
        lambda tp: tp.shared_zeros(8 + tp.rank, "f8"),
        ("8 float64", "9 float64"),
    ),
}


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_differs_is_an_error_of_all_ranks(tp, name: str) -> None:
    """A25"""
    call, lines = CALLS[name]
    fails(lambda: call(tp), "call different operations:\n", *lines)
    # Nothing was called, so nothing is left over
    assert tp.all_reduce(np.ones(2)).tolist() == [2, 2]


@pytest.mark.mpi(3)
def test_one_rank_tells_of_all_and_equal_ones_are_told_once(tp) -> None:
    with pytest.raises(CommError) as caught:
        tp.all_reduce(np.ones(4 + (tp.rank == 1)))
    assert caught.value.speaks is (tp.rank == 0)
    one, other = str(caught.value).splitlines()[1:]
    assert re.fullmatch(here(r"  ranks 0, 2: all_reduce #1 \(sum of 4 float64\)"), one)
    assert re.fullmatch(here(r"  rank 1: all_reduce #1 \(sum of 5 float64\)"), other)


@pytest.mark.mpi(2)
def test_rows_that_are_not_expected_are_found(tp) -> None:
    leaving, arriving = [[1, 2], [1, 1]][tp.rank], [[1, 1], [3, 1]][tp.rank]
    x = np.ones((sum(leaving), 2))
    fails(
        lambda: tp.all_to_all(x, (leaving, arriving)),
        "disagree on rows: place 0 sends 2 rows to place 1, which expects 3",
    )


@pytest.mark.mpi(2)
@pytest.mark.parametrize("size", [3, 1 << 18])
@pytest.mark.parametrize(("more", "kind"), [(1, "f8"), (0, "i8"), (-1, "f8")])
def test_a_message_that_differs_is_an_error_of_its_receiver(
    spoilt, size: int, more: int, kind: str
) -> None:
    x, out = np.ones(size), np.zeros(size + more, kind)
    LEFT.append((x, out))
    if spoilt.rank == 0:
        # Too large a message may never leave
        spoilt.send_start(x, to=1, tag=7).test()
        return
    with pytest.raises(CommError) as caught:
        spoilt.recv(out, source=0, tag=7)
    there = here(rf"rank 0 sends {size} float64")
    mine = here(rf"rank 1 expects {size + more} {out.dtype}")
    start = r"recv #1 on axis tp \(rank 0 to 1, tag 7\): "
    assert re.fullmatch(f"{start}{there}, {mine}", str(caught.value))


@pytest.mark.mpi(2)
def test_right_calls_give_what_they_always_give(tp) -> None:
    """Large messages too, and receives that are waited for last."""
    n = 1 << 17
    other = 1 - tp.rank
    arriving = tp.recv_start(np.zeros(n), source=other)
    tp.send(np.full(n, tp.rank + 1.0), to=other)
    tp.barrier()
    assert arriving.wait()[0] == other + 1
    out = tp.send_recv(np.full(3, float(tp.rank)), other, np.zeros(3), other, tag=2)
    assert out.tolist() == [other] * 3
    x = tp.shared_zeros(1 << 16, "f8")
    x += tp.rank + 1
    assert tp.all_reduce_start(x).wait()[0] == 3
    parts = tp.all_gather(np.ones((1 + tp.rank, 2)), [1, 2])
    assert parts.shape == (3, 2)
    counts = [[1, 2], [1, 1]][tp.rank], [[1, 1], [2, 1]][tp.rank]
    assert tp.all_to_all(np.ones((sum(counts[0]), 2)), counts).shape[1] == 2
    assert tp.all_gather_obj(tp.rank) == [0, 1]
    assert set(tp.counters.since()["tp"]) >= {"all_reduce", "send", "all_gather"}
