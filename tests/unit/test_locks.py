"""A40: checkpoints need no file locks: file systems without them, and stuck writers."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import pytest
from saved import in_child, is_of, names, read, save, tamper

from mpipar.checkpoint import is_complete
from mpipar.errors import CheckpointError

TESTS = Path(__file__).parents[1]
HOLD = """
import fcntl, sys
held = [open(name, "r+b") for name in sys.argv[1:]]
for file in held:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""
WRITE = """
import sys, h5py
held = [h5py.File(name, "r+", locking=True) for name in sys.argv[1:]]
print("held", flush=True)
sys.stdin.read()
"""
# Every way to lock a file fails as on NFS without locks, and is written down.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

static int refuse(const char *name)
{
    int log = open(getenv("LOCK_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log >= 0 && write(log, name, 6) == 6) close(log);
    errno = ENOLCK;
    return -1;
}

int flock(int file, int how) { return refuse("flock\n"); }
int lockf(int file, int how, off_t size) { return refuse("lockf\n"); }

#define FCNTL(NAME)                                                        \
    int NAME(int file, int command, ...)                                   \
    {                                                                      \
        va_list rest;                                                      \
        va_start(rest, command);                                           \
        void *given = va_arg(rest, void *);                                \
        va_end(rest);                                                      \
        if (command == F_SETLK || command == F_SETLKW) return refuse("fcntl\n"); \
        int (*real)(int, int, ...) = dlsym(RTLD_NEXT, #NAME);              \
        return real(file, command, given);                                 \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
"""
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@contextmanager
def holder(script: str, *files: Path) -> Iterator[None]:
    """Another process that holds files, until it is let go."""
    command = [sys.executable, "-c", script, *map(str, files)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def check_locked(file: Path) -> None:
    """The lock is real: HDF5 with locks finds it."""
    with pytest.raises(OSError, match="lock"), h5py.File(file, "r", locking=True):
        pass


@pytest.mark.parametrize("script", [HOLD, WRITE], ids=["locked", "open for writing"])
def test_files_that_another_process_holds_are_read(tmp_path: Path, script: str) -> None:
    folder = save(tmp_path, 10, seed=10).folder
    files = [folder / name for name in names(folder) if name.endswith(".h5")]
    with holder(script, *files):
        check_locked(folder / "shard_00000.h5")
        assert is_complete(folder)
        # A reader that waits for the lock would wait for ever.
        assert in_child(lambda: 1 / is_of(folder, 10)) == 0


def test_a_damaged_file_is_told_although_it_is_locked(tmp_path: Path) -> None:
    """HDF5 is asked what is wrong with it, and does not lock it either."""
    folder = save(tmp_path, 10).folder
    file = folder / "shard_00000.h5"
    with h5py.File(file, "r+") as h5:
        h5["x"] = [1.0]
    size = file.stat().st_size
    tamper(folder, lambda body: body["shards"][0].update(bytes=size))

    def refused() -> None:
        with pytest.raises(CheckpointError, match="dataset 'x' is unknown"):
            read(folder)

    with holder(HOLD, file):
        assert in_child(refused) == 0


@pytest.fixture(scope="module")
def no_locks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which every lock fails, and the file that counts them."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = folder / "shim.so"
    words = ["-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"]
    subprocess.run([COMPILER, *words], check=True, timeout=60)
    return {"LD_PRELOAD": str(library), "LOCK_LOG": str(folder / "log")}


def run_with(
    env: dict[str, str], script: str, run: Path
) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = {**os.environ, **env, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", script, str(run)],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


ROUND_TRIP = """
import sys
from pathlib import Path
from saved import is_of, save
found = save(Path(sys.argv[1]), 10, seed=10)
assert found.error is None, found.error
assert is_of(found.folder, 10)
"""
LOCK = """
import fcntl, sys
fcntl.flock(open(sys.argv[1] + "/x", "w"), fcntl.LOCK_EX)
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_where_locks_fail_nothing_asks_for_one(
    tmp_path: Path, no_locks: dict[str, str]
) -> None:
    """Neither to save nor to load, views included."""
    log = Path(no_locks["LOCK_LOG"])
    done = run_with(no_locks, ROUND_TRIP, tmp_path)
    assert done.returncode == 0, done.stderr
    asked = log.read_text() if log.exists() else ""
    assert asked == ""
    # The shim works.
    assert "No locks available" in run_with(no_locks, LOCK, tmp_path).stderr
    assert log.read_text() == "flock\n"
