"""An error of one rank is raised on all."""

import pytest

from mpipar.comm import Communicator, Counters, NullCommunicator, raise_together
from mpipar.errors import ConfigError, DataError, MpiparError


@pytest.fixture
def axis(comm):
    return Communicator(comm, "world", Counters())


def agreed(kind, error, axis):
    with pytest.raises(kind) as caught:
        raise_together(error, axis)
    assert type(caught.value) is kind and caught.value.agreed
    return caught.value


@pytest.mark.mpi(3)
def test_no_error_is_no_error(axis):
    assert raise_together(None, axis) is None


@pytest.mark.mpi(3)
def test_one_rank_fails_and_all_raise(axis):
    """A25: a folder that only one rank cannot write."""
    mine = OSError("cannot write /runs/a") if axis.rank == 1 else None
    error = agreed(OSError, mine, axis)
    assert str(error) == "rank 1: cannot write /runs/a"
    assert error.__cause__ is mine


@pytest.mark.mpi(3)
def test_the_lowest_failing_rank_gives_the_class_and_every_message_is_listed(axis):
    mine = [None, DataError("no file a"), ValueError("b is 3")][axis.rank]
    error = agreed(DataError, mine, axis)
    assert str(error) == "rank 1: no file a\nrank 2: b is 3"
    assert error.exit_code == 2


@pytest.mark.mpi(3)
def test_equal_messages_are_said_once(axis):
    assert str(agreed(DataError, DataError("no file"), axis)) == "no file"
    mine = DataError("no file") if axis.rank else None
    assert str(agreed(DataError, mine, axis)) == "ranks 1, 2: no file"


@pytest.mark.mpi(3)
def test_attributes_and_odd_constructors_survive(axis):
    wrong = ConfigError(["a = 1 must be 2"], "the recipe") if axis.rank else None
    error = agreed(ConfigError, wrong, axis)
    assert error.violations == ["a = 1 must be 2"]
    assert "a = 1 must be 2" in str(error)

    class LocalError(Exception):
        pass

    mine = LocalError("odd") if axis.rank else None
    assert "LocalError: odd" in str(agreed(MpiparError, mine, axis))
    mine = UnicodeDecodeError("utf8", b"x", 0, 1, "bad") if axis.rank else None
    assert "UnicodeDecodeError: ranks 1, 2: " in str(agreed(MpiparError, mine, axis))


def test_alone_the_error_itself_is_raised():
    error = DataError("no file")
    assert agreed(DataError, error, NullCommunicator("world")) is error
