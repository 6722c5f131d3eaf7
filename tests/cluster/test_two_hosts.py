"""Training over two hosts: ranks lie as the axes want it, and the wire carries what the
formulas say."""

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError

import pytest
from cluster.hosts import obstacle, two_hosts
from faults.run import start, steps_of, train, write_recipe

# Enough tokens that activations are more than gradients
SIZES = (
    "model.width=256", "model.heads=4", "model.layers=2", "model.context=64",
    "train.precision=fp32", "train.global_batch=48", "parallel.tensor=2",
    "train.eval_samples=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := obstacle():
        pytest.skip(reason)
    with ExitStack() as stack:
        hosts = two_hosts(tmp_path_factory.mktemp("hosts"), ranks=2)
        try:
            made = stack.enter_context(hosts)
        except CalledProcessError as problem:
            pytest.skip(f"no network of two hosts here: {problem.stderr.strip()}")
        yield made


def on_hosts(hosts, *words, **options):
    return train(
        4, *words, launcher=hosts.launcher, timeout=120, **hosts.env, **options
    )


def sent_a_step(hosts, folder: Path, *words: str) -> float:
    """Bytes that a host sends in a step: what more steps send more."""
    totals = []
    for steps in (2, 8):
        before = hosts.sent()
        out = folder / f"{steps}"
        on_hosts(hosts, write_recipe(folder), *SIZES, *words, f"train.steps={steps}",
                 "--out", out)  # fmt: skip
        totals.append(max(b - a for a, b in zip(before, hosts.sent(), strict=True)))
    return (totals[1] - totals[0]) / 6


def counted_a_step(run: Path, *axes: str) -> int:
    """Bytes that one rank sends along these axes in a step, as the run has counted."""
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return sum(x["bytes"] for a in axes for x in line["comm"].get(a, {}).values())


@pytest.mark.full
def test_the_wire_carries_the_gradients_and_nothing_else(hosts, tmp_path):
    sent = sent_a_step(hosts, tmp_path)
    counted = 2 * counted_a_step(tmp_path / "8", "grad")
    assert counted < sent < 1.05 * counted
    (tmp_path / "wrong").mkdir()
    order = 'parallel.order=["dp", "cp", "tp", "pp"]'
    wrong = sent_a_step(hosts, tmp_path / "wrong", order)
    tensor = 2 * counted_a_step(tmp_path / "wrong" / "8", "tp")
    assert tensor < wrong < 1.05 * tensor + 0.05 * sent
    assert wrong > sent


@pytest.mark.full
def test_hosts_exchange_what_their_ranks_have_summed(hosts, tmp_path):
    """Gradients are scattered and weights gathered once between hosts, whatever ranks
    there are: (N-1)/N of each."""
    sent, whole = {}, {}
    for name in ("true", "false"):
        (tmp_path / name).mkdir()
        words = ("parallel.tensor=1", "parallel.zero=2", "train.micro_batch=12",
                 f"parallel.hierarchical={name}")  # fmt: skip
        sent[name] = sent_a_step(hosts, tmp_path / name, *words)
        # A rank counts 3/4 of each array, by formula.
        whole[name] = counted_a_step(tmp_path / name / "8", "grad") * 4 / 3
    assert whole["true"] == whole["false"]
    formula = whole["true"] / 2
    assert formula < sent["true"] < 1.05 * formula
    # Scattering takes twice, gathering one and a half times as much at once.
    assert sent["false"] > 1.7 * sent["true"]


def test_a_run_says_where_it_is_and_computes_what_it_computes_elsewhere(
    hosts, tmp_path
):
    recipe = write_recipe(tmp_path)
    job = on_hosts(hosts, recipe, *SIZES, "--out", tmp_path / "two")
    assert "tp 2 x dp 2 = 4 ranks on 2 nodes" in job.output
    train(4, recipe, *SIZES, "--out", tmp_path / "one")
    for here, there in zip(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"),
                           strict=True):  # fmt: skip
        assert here[:3] == pytest.approx(there[:3], rel=1e-5)


def test_the_doctor_tells_how_fast_the_network_is(hosts, tmp_path):
    words = ("doctor", "--json", tmp_path / "found.json")
    with start(4, *words, launcher=hosts.launcher, **hosts.env) as run:
        job = run.job.result()
    assert job.status == 0, job.output
    found = {f["name"]: f for f in json.loads((tmp_path / "found.json").read_text())}
    inside, between = found["messages"]["details"]
    assert inside["a"] == inside["b"] == hosts.names[0]
    assert [between["a"], between["b"]] == hosts.names
    # At most 1 Gbit/s, whoever else keeps the processor
    assert 0.02e9 < between["bandwidth"] < 0.14e9
    assert found["clocks"]["state"] == "ok"


def test_a_rank_that_dies_on_the_other_host_ends_the_job(hosts, tmp_path):
    words = (
        write_recipe(tmp_path),
        *SIZES,
        "train.steps=100000",
        "--out",
        tmp_path / "x",
    )
    with start(4, "train", *words, launcher=hosts.launcher, **hosts.env) as run:
        run.wait_for("step 5/")
        run.kill(run.ranks()[3], signal.SIGKILL)
        job = run.end(40)
    assert job.status not in (0, 3) and not job.late and job.left == [], job.output
