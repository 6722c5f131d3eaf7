"""The speed commands: arithmetic of their tables, refusals, and a tiny run of each."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launcher import Job, environment, run_job

from mpipar.bench import clock, peers
from mpipar.bench.clock import CATEGORIES, OTHER, OpsClock, category
from mpipar.bench.contestants import CONTESTANTS, NAMES, Match, chosen, names_on
from mpipar.bench.peers import CHANGES, run_peers
from mpipar.bench.step import COMMUNICATION, PYTHON, WAITING, Profile, summarize
from mpipar.bench.table import Result, Table
from mpipar.bench.work import fuse
from mpipar.cli import main
from mpipar.errors import ConfigError
from mpipar.ops import Ops

LOSSES = [5.5, 5.25, 5.0, 4.75]
NO_PYTHON = "/nowhere/python"


def ran(name: str, ms: float, losses: list[float] | None = None) -> Result:
    memory = {"start_peak": 2 << 20, "steps_peak": 3 << 20, "proportional": 1 << 20}
    seconds = [ms / 1e3, 9.0, ms / 1e3]
    return Result(chosen([name])[0], seconds, losses or [*LOSSES], 4000, memory, {})


def table(*results: Result, reasons: dict[str, str] | None = None) -> Table:
    by_name = {r.contestant.name: r for r in results}
    return Table(chosen([*by_name, *(reasons or {})]), by_name, reasons or {})


# --- the table of bench peers ---------------------------------------------------------


def test_ratios_compare_equal_precision_and_cores() -> None:
    results = [
        ran("torch-eager-1", 4000),
        ran("torch-eager", 2000),
        ran("torch-ddp", 1900),
        ran("torch-bf16", 1300),
        ran("mpipar-1x1", 3200),
        ran("mpipar-dp", 1520),
        ran("mpipar-bf16-dp", 1000),
    ]
    found = table(*results)
    assert [found.to_best(r) for r in results[-3:]] == [1.25, 1.25, 1.3]
    assert [found.to_reference(r) for r in results[-2:]] == [2 / 1.52, 2.0]
    entry = found.as_dict()["contestants"][5]
    assert entry["tokens_per_second"] == pytest.approx(4000 / 1.52)
    assert entry["seconds"] == [1.52, 9.0, 1.52] and entry["losses"] == LOSSES


def test_pipelines_compare_with_the_pipelines_of_torch() -> None:
    torch = [ran("torch-pp-1f1b", 2400), ran("torch-pp-zb", 2500)]
    ours = [ran("mpipar-pp-1f1b", 2000), ran("mpipar-pp-zb-h1", 1600)]
    found = table(*torch, *ours)
    assert [found.to_best(r) for r in ours] == pytest.approx([1.2, 1.5])
    # As for every other layout, what is faster on the same cores is the best.
    faster = table(ran("torch-ddp", 1800), ran("torch-eager-1", 900), *torch, *ours)
    assert [faster.to_best(r) for r in ours] == pytest.approx([0.9, 1.125])


def test_without_torch_there_are_no_ratios() -> None:
    found = table(ran("mpipar-1x1", 10), reasons={"torch-eager": "it is not there"})
    only = found.results["mpipar-1x1"]
    assert (found.to_best(only), found.to_reference(only)) == (None, None)
    assert found.as_dict()["contestants"][0]["not_run"] == "it is not there"


@pytest.mark.parametrize(
    ("name", "factor", "disagrees"),
    [
        ("mpipar-dp", 1.0005, False),
        ("mpipar-dp", 1.002, True),
        ("mpipar-bf16-dp", 1.002, False),
        ("mpipar-bf16-dp", 1.03, True),
        ("mpipar-dp", math.nan, True),
    ],
)
def test_losses_tell_who_did_other_work(
    name: str, factor: float, disagrees: bool
) -> None:
    other = ran(name, 10, [*LOSSES[:3], LOSSES[3] * factor])
    found = table(ran("torch-eager", 10), other)
    assert found.disagreeing == ([name] if disagrees else [])
    assert ("FAILED" in " ".join(found.verdict())) == disagrees


def test_only_the_first_steps_are_compared() -> None:
    found = table(ran("torch-eager", 10, [*LOSSES, 1.0]), ran("mpipar-dp", 10))
    assert found.disagreeing == []


def test_the_table_shows_everyone(capsys: pytest.CaptureFixture) -> None:
    table(ran("torch-eager", 10), reasons={"torch-tp": "3 [heads]"}).show("title")
    shown = capsys.readouterr().out
    assert "10.0" in shown and "not run: torch-tp: 3 [heads]" in shown
    assert max(map(len, shown.splitlines()[:4])) <= 80


def test_every_contestant_has_a_command_for_each_process(tmp_path: Path) -> None:
    match = Match("tiny", ("a.b=1",), tmp_path, (4, 5, 6), "python-with-torch", 24)
    for contestant in CONTESTANTS:
        commands = match.commands(contestant, tmp_path)
        words = commands[0]
        if contestant.library == "mpipar":
            assert len(commands) == 1 and {"tiny", "a.b=1"} <= set(words)
        else:
            assert len(commands) == contestant.processes(3)
            module = f"mpipar.bench.{contestant.library}_worker"
            assert words[:3] == ["python-with-torch", "-m", module]
    tp = match.commands(chosen(["mpipar-tp"])[0], tmp_path)[0]
    assert tp[1:3] == ["-n", "3"] and "parallel.tensor=3" in tp
    alone = match.commands(chosen(["mpipar-1x1"])[0], tmp_path)[0]
    assert "--cores=4" in alone and "-n" not in alone


def test_pipelines_make_a_batch_in_as_many_parts(tmp_path: Path) -> None:
    match = Match("tiny", CHANGES, tmp_path, (4, 5), "python-with-torch", 24)
    for name in ("1f1b", "zb-h1"):
        ours = match.commands(chosen([f"mpipar-pp-{name}"])[0], tmp_path)[0]
        after = ours[ours.index("train.micro_batch=0") :]
        assert ours[1:3] == ["-n", "2"] and f"parallel.schedule={name}" in after
        assert {"parallel.pipeline=2", "train.micro_batch=3"} <= set(after)
    for name in ("1f1b", "zb"):
        both = match.commands(chosen([f"torch-pp-{name}"])[0], tmp_path)
        shared = {f"--mode=pp-{name}", "--micro-batches=8", "--threads=1"}
        assert [shared <= set(words) for words in both] == [True, True]
        assert [words[-1] for words in both] == ["--rank=0", "--rank=1"]
    whole = match.commands(chosen(["mpipar-dp"])[0], tmp_path)[0]
    assert [w for w in whole if "micro_batch" in w] == ["train.micro_batch=0"]


def test_a_gpu_is_used_where_the_recipe_names_it(tmp_path: Path) -> None:
    assert set(names_on("auto")) | set(names_on("cuda")) == set(NAMES)
    match = Match("tiny", CHANGES, tmp_path, (4, 5), "python-with-torch", 8)
    for name in names_on("cuda"):
        (words,) = match.commands(chosen([name])[0], tmp_path)
        assert {"train.device=cuda", "--device=cuda"} & set(words)
        assert "train.device=cpu" not in words and "-n" not in words
    found = table(ran("torch-bf16", 10), ran("torch-cuda", 4), ran("mpipar-cuda", 2))
    assert found.to_best(found.results["mpipar-cuda"]) == 2.0


def test_weights_that_are_not_shared_are_not_judged() -> None:
    results = {"torch-cuda": ran("torch-cuda", 4), "mpipar-cuda": ran("mpipar-cuda", 2)}
    results["mpipar-cuda"].losses[:] = [9.0] * 4
    assert Table(chosen(results), results, {}).disagreeing == ["mpipar-cuda"]
    assert Table(chosen(results), results, {}, judged=False).disagreeing == []


def test_a_batch_that_cannot_be_cut_is_told(tmp_path: Path) -> None:
    match = Match("tiny", (), tmp_path, (4, 5), "python-with-torch", 18)
    cut = [c.name for c in CONTESTANTS if match.obstacle(c)]
    assert cut and cut == [name for name in NAMES if "-pp-" in name]
    assert "try train.global_batch=24" in match.obstacle(chosen(cut)[0])


def test_the_partition_needs_no_installed_package() -> None:
    root = Path(peers.__file__).parents[2]
    line = [sys.executable, "-S", "-c", "import mpipar.pipeline.partition"]
    subprocess.run(line, check=True, cwd=root)


def test_jax_uses_all_cores_and_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", "7")
    match = Match("tiny", (), tmp_path, (4, 5, 6), "python-with-jax", 24)
    jax = chosen(["jax"])[0]
    environment = match.environment(jax)
    assert environment["NPROC"] == "3" and environment["JAX_PLATFORMS"] == "cpu"
    assert environment["PYTHONPATH"] == str(tmp_path)
    assert "--cores=4,5,6" in match.commands(jax, tmp_path)[0]


def test_joined_projections_hold_a_run_of_rows_for_each_shard() -> None:
    parts = {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}
    weights = {f"a.{name}.bias": np.array(rows) for name, rows in parts.items()}
    # A GPT's "up" has no gate beside it.
    weights["mlp.up.bias"] = np.array([8])
    joined = fuse(weights, shards=2)
    assert joined["a.qkv.bias"].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert set(joined) == {"a.qkv.bias", "mlp.up.bias"}
    assert fuse(weights, 1)["a.qkv.bias"].tolist() == list(range(8))


# --- refusals -------------------------------------------------------------------------


def test_peers_does_not_start_inside_an_mpi_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(["bench", "peers", "tiny"]) == 2
    assert "without a launcher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ((), {"names": ("torch-eagr",)}, "torch-compile"),
        ((), {}, "--torch-python"),
        ((), {"names": NAMES, "rounds": 0}, "--rounds = 0"),
        (("model.dropout=0.1",), {"names": NAMES}, "try model.dropout=0"),
        (("train.micro_batch=2",), {"names": NAMES}, "try train.global_batch=2"),
        (("model.layers=0",), {"names": NAMES}, "model.layers"),
    ],
)
def test_peers_refuses_what_cannot_be_compared(
    changes: tuple[str, ...], options: dict, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_peers("tiny", changes, python=NO_PYTHON, **options)


def test_a_python_without_torch_is_known() -> None:
    assert not peers.has_module(NO_PYTHON, "json")
    assert peers.has_module(sys.executable, "json")
    assert not peers.has_module(sys.executable, "no_such_module")


# --- the clock and the summary of bench step ------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear_fwd", "matrix products"),
        ("linear_dw", "matrix products"),
        ("linear_db", OTHER),
        ("attention_bwd", "attention"),
        ("layernorm_fwd", "norms"),
        ("rmsnorm_bwd", "norms"),
        ("gelu_dx", "activation"),
        ("row_max", "loss"),
        ("xent_dx", "loss"),
        ("embedding_dw", "embedding"),
        ("adamw", "optimizer"),
        ("square_sum", "optimizer"),
        ("a_new_op", OTHER),
    ],
)
def test_ops_have_categories(name: str, kind: str) -> None:
    assert category(name) == kind


def test_ops_that_exist_cover_every_category() -> None:
    names = [name for name in dir(Ops) if not name.startswith("_")]
    assert {category(name) for name in names} == set(CATEGORIES)


class Nested:
    """Ops that call each other; every look at the clock takes a second."""

    def synchronize(self) -> None:
        pass

    def linear_fwd(self) -> None:
        self.helper()
        self.gelu_fwd()

    def gelu_fwd(self) -> None:
        pass

    def helper(self) -> None:
        pass


def test_nested_ops_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
    ops = Nested()
    watch = OpsClock(ops)
    ops.linear_fwd()
    taken = watch.take()
    # 5 seconds from first to last look, one of them inside gelu.
    assert taken["matrix products"] == 4 and taken["activation"] == 1
    ops.helper()
    assert watch.take()[OTHER] == 1


def test_summary_is_the_median_step_over_ranks() -> None:
    def profile(times: list[float], rate: float) -> Profile:
        rest = dict.fromkeys((COMMUNICATION, WAITING, PYTHON), 0.5)
        steps = [dict.fromkeys(CATEGORIES, 0.0) | rest | {OTHER: t} for t in times]
        return Profile(steps, [0, 10, 20], 6, rate, 100)

    found = summarize([profile([9.0, 1.0, 2.0], 4.0), profile([9.0, 2.0, 2.0], 2.0)])
    assert found.seconds[OTHER] == 2.0 and found.step_s == 3.5
    assert (found.flops, found.rate, found.limit_s) == (12, 6.0, 3.0)
    assert found.closeness == pytest.approx(3.0 / 3.5)
    assert (found.faults, found.peak_bytes) == (20, 200)


# --- both for real --------------------------------------------------------------------


@pytest.fixture
def two_cores() -> Iterator[None]:
    """As many processes on any machine: jobs inherit the cores of this one."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


def bench(folder: Path, *words: str) -> Job:
    until = time.monotonic() + 240
    line = [sys.executable, "-m", "mpipar", "bench", *words]
    return run_job(line, folder, environment(folder), lambda: time.monotonic() > until)


def test_step_accounts_for_the_whole_time(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    job = bench(tmp_path, "step", "tiny", "--steps=3", f"--json={file}")
    assert (job.status, job.left) == (0, []), job.output
    facts = json.loads(file.read_text())
    assert sum(facts["seconds"].values()) == pytest.approx(facts["step_s"])
    assert facts["seconds"]["matrix products"] > 0 and facts["seconds"][PYTHON] > 0
    assert 0 < facts["closeness"] < 1 and len(facts["ranks"][0]["steps"]) == 3
    assert "matrix products" in job.output and "GFLOP/s" in job.output


@pytest.mark.usefixtures("two_cores")
def test_peers_runs_those_that_can(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    pipelines = ["mpipar-pp-1f1b", "mpipar-pp-zb-h1"]
    names = ["torch-eager", "jax", "mpipar-1x1", "mpipar-dp", "mpipar-tp", *pipelines]
    options = [f"--peers={','.join(names)}", "--rounds=2", f"--json={file}"]
    # A single head cannot be cut over two ranks.
    words = ("tiny", "model.heads=1", *options, f"--torch-python={NO_PYTHON}")
    job = bench(tmp_path, "peers", *words)
    assert (job.status, job.left) == (0, []), job.output
    assert f"not run: torch-eager: torch is not installed for {NO_PYTHON}" in job.output
    assert f"not run: jax: jax is not installed for {NO_PYTHON}" in job.output
    assert "not run: mpipar-tp: ConfigError: the recipe has" in job.output
    entries = json.loads(file.read_text())["contestants"]
    assert [e["name"] for e in entries] == names
    missing = [entry["name"] for entry in entries if "not_run" in entry]
    assert missing == ["torch-eager", "jax", "mpipar-tp"]
    for entry in entries[2:4] + entries[5:]:
        assert len(entry["seconds"]) == 2 and len(entry["losses"]) == 6
        assert entry["loss_deviation"] < 1e-5
        assert entry["memory_bytes"]["proportional"] > 1 << 20
