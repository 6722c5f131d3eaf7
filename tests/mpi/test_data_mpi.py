"""Loading on many ranks: the same text everywhere, refusals together, and workers."""

import numpy as np
import pytest

from mpipar.data import (
    ByteTokenizer,
    Loader,
    Sampler,
    TokenStream,
    check_batch,
    load_tokens,
)
from mpipar.errors import DataError

S = 16


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks: that of rank 0."""
    return comm.broadcast_obj(tmp_path)


@pytest.fixture
def comm(comm):
    """The fresh communicator in the wrapper that the project uses."""
    from mpipar.comm import Communicator, Counters

    return Communicator(comm, "dp", Counters())


def load(source, comm, vocab=256):
    return load_tokens(str(source), ByteTokenizer(), 0.0, S, vocab, comm)


def refusal(source, comm, vocab=256):
    """Return the message of a refusal, after finding it the same on all ranks."""
    with pytest.raises(DataError) as caught:
        load(source, comm, vocab)
    assert caught.value.agreed
    messages = comm.all_gather_obj(str(caught.value))
    assert len(set(messages)) == 1
    return messages[0]


def save(comm, path, ids):
    if comm.rank == 0:
        np.save(path, ids)
    comm.barrier()


@pytest.mark.mpi(3)
def test_all_ranks_train_on_the_text_of_rank_0(comm, tmp_path):
    text = f"the text of rank {comm.rank} is not that of others".encode()
    own = tmp_path / f"rank{comm.rank}.txt"
    own.write_bytes(text)
    stream = load(own, comm)
    expected = b"the text of rank 0 is not that of others\0"
    assert stream.ids.tobytes() == expected
    assert not stream.ids.flags.writeable


@pytest.mark.mpi(3)
@pytest.mark.parametrize("kind", ["missing", "dangling", "folder", "binary"])
@pytest.mark.parametrize("suffix", [".txt", ".npy"])
def test_paths_are_refused_by_name_on_all_ranks(comm, folder, kind, suffix):
    """A51."""
    path = folder / f"source{suffix}"
    if comm.rank == 0:
        if kind == "dangling":
            path.symlink_to(folder / "gone")
        elif kind == "folder":
            path.mkdir()
        elif kind == "binary":
            path.write_bytes(b"\0" * 100)
    comm.barrier()
    assert str(path) in refusal(path, comm)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("n", [0, 1, 16, 17, 18])
@pytest.mark.parametrize("suffix", [".txt", ".npy"])
def test_short_sources_give_one_sample_or_the_counts(comm, folder, n, suffix):
    """A51: 17 and 18 tokens are one sample of 16, fewer are refused."""
    path = folder / f"source{suffix}"
    if suffix == ".npy":
        save(comm, path, np.zeros(n, np.uint8))
    else:
        # The end of the document is a token too
        if comm.rank == 0:
            path.write_bytes(b"x" * max(0, n - 1))
        comm.barrier()
        n = n if n > 1 else 0
    if n > S:
        assert load(path, comm).train_samples == 1
    else:
        assert f"{n} tokens" in refusal(path, comm)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("bad", [101, 102, 70000, -1])
@pytest.mark.parametrize("at", [0, 499, 500, 999])
def test_a_bad_id_is_refused_alike_whoever_finds_it(comm, folder, bad, at):
    """A52: also when each rank is alone, as with tp = 1."""
    from mpipar.comm import NullCommunicator

    path = folder / "ids.npy"
    ids = np.zeros(1000, np.int32)
    ids[at] = bad
    save(comm, path, ids)
    message = refusal(path, comm, vocab=101)
    assert f"token id {bad} at offset {at} is not in the vocabulary of 101" in message
    assert refusal_alone(path, NullCommunicator("dp")) == message


def refusal_alone(path, comm):
    with pytest.raises(DataError) as caught:
        load(path, comm, 101)
    return str(caught.value)


@pytest.mark.mpi(2)
def test_the_first_of_several_bad_ids_is_named(comm, folder):
    """A52: the lowest offset, so the message does not depend on the layout."""
    ids = np.zeros(1000, np.int32)
    ids[[300, 700]] = 200
    save(comm, folder / "ids.npy", ids)
    assert "offset 300" in refusal(folder / "ids.npy", comm, vocab=101)


@pytest.mark.mpi(2)
def test_token_files_that_differ_between_ranks_are_refused(comm, tmp_path):
    path = tmp_path / f"rank{comm.rank}.npy"
    np.save(path, np.zeros(100 + comm.rank, np.uint16))
    message = refusal(path, comm)
    assert "rank 0 sees 100 ids" in message
    assert "rank 1 sees 101 ids" in message


@pytest.mark.mpi(2, timeout=120)
def test_workers_under_mpi_give_the_same_batches(comm, folder):
    """A35: two workers on each of two ranks, 100 steps, none of which imports MPI."""
    ids = np.arange(5000, dtype=np.uint16) % 251
    save(comm, folder / "ids.npy", ids)
    stream = load(folder / "ids.npy", comm)
    sampler = Sampler(stream, 7, 8, 2, comm.rank, comm.size)
    with Loader(sampler, workers=2, stop=100) as loader:
        for step in range(100):
            expected = sampler.train_batches(step)
            for one, other in zip(loader.train_batches(step), expected, strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_array_equal(one.labels, other.labels)
                np.testing.assert_array_equal(one.samples, other.samples)
                check_batch(one.tokens, one.labels, 251)
        names = "list(__import__('sys').modules) + list(__import__('os').environ)"
        seen = loader._pool.submit(eval, names).result()
        assert not [n for n in seen if n.startswith(("mpi4py", "PMI", "OMPI_"))]
    assert isinstance(stream, TokenStream)
    comm.barrier()
