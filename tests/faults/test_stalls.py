"""Whatever stops, the run ends in time with one report: who, where, in what.

Each stall is planted in a real run; see inject/sitecustomize.py. The report must name
rank, host, axis, operation, sequence number and source line.
"""

import json
import re
import socket
from pathlib import Path
from typing import NamedTuple

import pytest
from faults.run import SCRIPT, start, write_recipe

HOST = re.escape(socket.gethostname())
HASTE = "mpipar.comm.watchdog:Watchdog._overdue:*:hasten:*"
TIMEOUT = "log.timeout_s=80"
full, exhaustive = pytest.mark.full, pytest.mark.exhaustive
# What the first rank that waits says, and what it says of the culprit
WAITS = r"mpipar: rank {0} has waited \d+\.\d s in {1} on axis {2}, \d+ bytes, at {3}"
MISSES = r"  rank {0} did not arrive: {1}"
LAST = r"; its last collective on axis {0}: "
HEAD, STEP = "mpipar.layers.head:Head.forward", "mpipar.zero.adamw:AdamW.update"
REDUCE = "mpipar.comm.communicator:Communicator.all_reduce"
GRAD = WAITS.format(0, r"all_reduce #\d+", "grad", r"\S+/zero/gradients\.py:\d+\.")
SAVE = WAITS.format(0, r"all_reduce #\d+", "world", r"\S+/saver\.py:\d+\.")
PLANTED = rf"\S+/sitecustomize\.py:\d+ on host {HOST}"
SILENT = rf"no answer: .*\(process \d+ on host {HOST} is stopped by a signal\)"
COMPUTES = rf"it is computing at {PLANTED}" + LAST.format("grad") + r"all_reduce #\d+"


class Stall(NamedTuple):
    """A planted fault, and the lines of the report."""

    fault: str
    said: tuple[str, ...]
    words: tuple[str, ...] = ()
    ranks: int = 2


def blocked(rank: int, what: str, at: str) -> str:
    """The first line of a rank that reports on itself."""
    held = rf"is blocked in {what} for \d+\.\d s at {at}:\d+\."
    return rf"mpipar: rank {rank} on host {HOST} {held}"


def excuse(rank: int, what: str, at: str) -> str:
    """The line of a rank that others report on."""
    held = rf"it is blocked in {what} for \d+\.\d s at {at}:\d+ on host {HOST}"
    return MISSES.format(rank, held)


INJECTED, SHARD = r"\S+/sitecustomize\.py", r"\S+\.tmp/shard_0000{}\.h5"
EARLY, WAITED = ("checkpoint.every=2",), "checkpoint.async=false"
EITHER = r"(all_reduce|barrier) #\d+ on axis world"
STALLS = {
    "stopped": Stall(f"{HEAD}:1:stop:3", (GRAD, MISSES.format(1, SILENT))),
    "stopped-saving": Stall(
        "mpipar.checkpoint.shard:_write_all:1:stop:1",
        (SAVE, MISSES.format(1, SILENT)),
        (*EARLY, WAITED),
    ),
    "forward": Stall(f"{HEAD}:1:loop:3", (GRAD, MISSES.format(1, COMPUTES))),
    "optimizer": Stall(f"{STEP}:1:loop:3", (GRAD, MISSES.format(1, COMPUTES))),
    "data": Stall(
        "mpipar.data.sampler:Sampler.train_batches:1:block:3",
        (GRAD, excuse(1, r"reading a batch from \S+/corpus\.txt", INJECTED)),
    ),
    "metrics": Stall(
        "mpipar.train.metrics:_strict:0:block:3",
        (
            WAITS.format(1, r"all_reduce #\d+", "grad", r"\S+/gradients\.py:\d+\."),
            excuse(0, r"writing \S+/metrics\.jsonl", INJECTED),
        ),
    ),
    "flush": Stall(
        "os:fsync:1:block:1",
        (blocked(1, f"flushing {SHARD.format(1)}", INJECTED), r"  rank 0 on host "),
        EARLY,
    ),
    "write": Stall(
        "os:pwrite:1:block:2",
        (GRAD, excuse(1, f"writing {SHARD.format(1)}", INJECTED)),
        EARLY,
    ),
    "rename": Stall(
        "pathlib:Path.rename:0:block:1",
        (blocked(0, r"renaming \S+/step_00000002\.\w+\.tmp", INJECTED),),
        (*EARLY, WAITED),
    ),
    "alone": Stall(
        "os:fsync:0:block:1",
        (blocked(0, f"flushing {SHARD.format(0)}", INJECTED),),
        EARLY,
        ranks=1,
    ),
    "skips": Stall(
        f"{REDUCE}:1:skip:3",
        (
            r"mpipar: rank [01] has waited .* #\d+ on axis world",
            r"  rank [01] did not arrive: ",
        ),
    ),
    "another": Stall(
        f"{REDUCE}:1:extra:3",
        (
            rf"mpipar: rank [01] has waited .* in {EITHER}",
            rf"  rank [01] did not arrive: mismatch, it (called|is inside) {EITHER}",
        ),
    ),
    "stage": Stall(
        "mpipar.pipeline.transfer:Transfer.send:0:skip:2",
        (
            r"mpipar: rank 0 has waited .* in recv #\d+ on axis pp \(rank 1 to 0",
            r"  rank 1 did not arrive: it is inside recv #\d+ on axis pp \(rank 0 to 1,"
            rf" tag \d+\) since \d+\.\d s at \S+/transfer\.py:\d+ on host {HOST}; .*"
            r"it waits for rank 0 itself",
        ),
        ("parallel.pipeline=2", "train.micro_batch=1", "parallel.schedule=gpipe"),
    ),
}
# Those left to the exhaustive tier stop in the same ways as others
MARKS = {
    **dict.fromkeys(("stopped", "flush", "skips"), ()),
    **dict.fromkeys(("stopped-saving", "metrics", "rename", "alone"), exhaustive),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS.get(n, full)) for n in STALLS]
)
def test_a_stall_ends_with_the_right_names(tmp_path: Path, name: str) -> None:
    """A24, A25"""
    stall = STALLS[name]
    recipe = write_recipe(tmp_path)
    words = (TIMEOUT, *stall.words, "--out", tmp_path / "run")
    options = {"timeout": 120, "MPIPAR_TEST_FAULT": f"{stall.fault} {HASTE}"}
    with start(stall.ranks, "train", recipe, *words, **options) as run:
        job = run.job.result()
        took = run.since_fault()
    assert job.status != 0 and not job.late and job.left == [], job.output
    assert took < 60
    reports = re.findall(r"^.*mpipar: rank \d+ .*$", job.output, re.M)
    assert len(reports) == 1 == job.output.count("The job ends now"), job.output
    for line in stall.said:
        assert re.search(f"^{line}", job.output, re.M), f"{line}\n{job.output}"


@full
def test_a_rank_that_died_is_named_where_the_launcher_does_not_notice(
    tmp_path: Path,
) -> None:
    recipe = write_recipe(tmp_path)
    words = (TIMEOUT, "--out", tmp_path / "run")
    options = {"timeout": 120, "MPIPAR_TEST_FAULT": f"{HEAD}:1:kill:3 {HASTE}"}
    # Something in the place of each rank lives on
    options["program"] = ["sh", "-c", '"$@"; exec sleep 100', "sh", *SCRIPT]
    with start(2, "train", recipe, *words, **options) as run:
        job = run.job.result()
    assert job.status != 0 and not job.late and job.left == [], job.output
    line = MISSES.format(1, rf"no answer: .*\(process \d+ on host {HOST} has died\)")
    assert re.search(f"^{GRAD}", job.output, re.M), job.output
    assert re.search(f"^{line}", job.output, re.M), job.output


@full
def test_a_straggler_is_named(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    words = ("train.steps=35", "--out", tmp_path / "run")
    options = {"timeout": 120, "MPIPAR_TEST_FAULT": f"{HEAD}:1:lag:*"}
    with start(2, "train", recipe, *words, **options) as run:
        job = run.job.result()
    assert job.status == 0, job.output
    (line,) = re.findall(r"^warning: rank .*$", job.output, re.M)
    name = rf"warning: rank 1 on host {HOST} is (\d+\.\d) times as slow as "
    said = re.fullmatch(rf"{name}the median rank over the last 30 steps", line)
    assert said and float(said[1]) >= 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    slow = {
        json.loads(line)["step"]: json.loads(line).get("stragglers") for line in lines
    }
    assert [step for step, found in slow.items() if found] == [30]
    (found,) = slow[30]
    assert (found["rank"], found["host"], found["steps"]) == (
        1,
        socket.gethostname(),
        30,
    )
    assert found["ratio"] > 2


@full
def test_debug_mode_ends_a_run_before_the_wrong_call(tmp_path: Path) -> None:
    """A25"""
    recipe = write_recipe(tmp_path)
    words = ("log.check_calls=true", "--out", tmp_path / "run")
    options = {"timeout": 60, "MPIPAR_TEST_FAULT": f"{REDUCE}:1:extra:3"}
    with start(2, "train", recipe, *words, **options) as run:
        job = run.job.result()
    assert job.status != 0 and not job.late and job.left == [], job.output
    assert job.output.count("Traceback") == 1, job.output
    assert "the ranks of axis world call different operations:" in job.output
    assert re.search(r"rank 0: all_reduce #\d+ \(sum of \d+ float64\) at ", job.output)
    assert re.search(r"rank 1: barrier #\d+ at \S+sitecustomize", job.output)
