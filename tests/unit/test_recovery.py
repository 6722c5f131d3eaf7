"""What a run goes on with when ranks are lost, and where it cannot."""

import pytest

from mpipar.comm import losses
from mpipar.config import read_recipe
from mpipar.errors import ConfigError
from mpipar.train.recovery import fitting

TEXT = """
[model]
layers = 2
width = 32
heads = 4
context = 16
[train]
global_batch = 24
"""


@pytest.mark.parametrize(
    ("words", "ranks", "left", "data", "micro"),
    [
        ([], 4, 3, 3, 4),  # of 8 sequences
        ([], 4, 1, 1, 6),
        ([], 8, 7, 6, 2),  # of 3 sequences, 24 / 6 has no whole number
        (["train.micro_batch=3"], 8, 5, 4, 3),
        (["parallel.tensor=2"], 8, 7, 3, 4),
        (["parallel.tensor=2", "parallel.pipeline=2"], 8, 7, 1, 2),
        (["parallel.zero=1", "parallel.zero_shard=2"], 4, 3, 2, 6),
        (["parallel.data=4"], 4, 3, 3, 4),
    ],
)
def test_as_many_data_ranks_go_on_as_fit(words, ranks, left, data, micro) -> None:
    before = read_recipe(TEXT, words, ranks=ranks)
    after = fitting(before, left)
    assert (after.parallel.data, after.train.micro_batch) == (data, micro)
    assert after.train.global_batch == 24
    axes = before.parallel.axes | {"dp": data}
    assert after.parallel.axes == axes


def test_less_than_one_replica_does_not_go_on() -> None:
    recipe = read_recipe(TEXT, ["parallel.tensor=4"], ranks=8)
    assert fitting(recipe, 4).parallel.data == 1
    assert fitting(recipe, 3) is None


def test_copies_are_for_runs_that_recover() -> None:
    with pytest.raises(ConfigError, match="copy_every = 3 is for train.recover = true"):
        read_recipe(TEXT, ["checkpoint.copy_every=3"])
    read_recipe(TEXT, ["checkpoint.copy_every=3", "train.recover=true"])


class _OpenMPI:
    @staticmethod
    def get_vendor() -> tuple[str, tuple[int, ...]]:
        return "Open MPI", (5, 0, 11)


def test_only_a_launch_with_ulfm_outlives_a_rank(monkeypatch) -> None:
    monkeypatch.setattr(losses, "mpi", _OpenMPI)
    assert losses.obstacle({"OMPI_MCA_mpi_ft_enable": "1"}) is None
    assert "without --with-ft ulfm" in losses.obstacle({})
    monkeypatch.setattr(_OpenMPI, "get_vendor", lambda: ("MPICH", (5, 0, 2)))
    assert losses.obstacle({}) == "the MPI library is MPICH"
