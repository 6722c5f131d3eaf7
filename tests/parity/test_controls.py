"""Negative controls: every planted fault must make the comparison fail."""

import json
import sys
from pathlib import Path

import pytest
from parity import faults
from parity.build import FP64, TEXT, compare, make_recipe, reference, write_tokens

from mpipar.verify import run_verification

GPT, LLAMA = "model.family=gpt", "model.family=llama"
TP2, SP = "parallel.tensor=2", "parallel.sequence=true"
ONE_KV, DROPOUT = "model.kv_heads=1", "model.dropout=0.1"
FIRST_K = "blocks.0.attention.k.weight"

# fault, recipe, and among others what must differ
PLANTED = [
    (faults.drop_forward_sum, [GPT, TP2], "loss"),
    (faults.drop_backward_sum, [GPT, TP2], "gradients blocks.1.norm2.gain"),
    (faults.drop_backward_sum, [LLAMA, TP2], "gradients blocks.1.norm2.gain"),
    (faults.skip_replicas, [GPT, TP2, SP], "gradients head.norm.gain"),
    (faults.skip_replicas, [LLAMA, TP2, SP], "gradients blocks.0.norm1.gain"),
    (faults.skip_replicas, [LLAMA, TP2, ONE_KV], f"gradients {FIRST_K}"),
    (faults.skip_replicas, [GPT, TP2, ONE_KV], "gradients blocks.0.attention.v.bias"),
    (faults.average_over_data, [GPT], "gradients embedding.token.weight"),
    (faults.shift_queries, [LLAMA, TP2, ONE_KV], "loss"),
    (faults.shift_learned_positions, [GPT, TP2], "loss"),
    (faults.add_bias_on_every_rank, [GPT, TP2], "loss"),
    (faults.add_bias_on_every_rank, [GPT, TP2, SP], "loss"),
    (faults.count_on_every_rank, [GPT, TP2], "grad_norm"),
    (faults.count_on_every_rank, [LLAMA, TP2, ONE_KV], "grad_norm"),
    (faults.count_data_ranks, [GPT], "grad_norm"),
    (faults.reseed_last_rank, [GPT, TP2, DROPOUT], "loss"),
    (faults.reseed_last_rank, [LLAMA, TP2, SP, DROPOUT], "loss"),
]
IDS = [f"{fault.__name__}-{'-'.join(words)}" for fault, words, _ in PLANTED]


@pytest.mark.parametrize(("fault", "words", "what"), PLANTED, ids=IDS)
@pytest.mark.mpi(2)
def test_a_planted_fault_is_found(comm, monkeypatch, fault, words, what):
    recipe = make_recipe(2, *words)
    reference(recipe)
    assert compare(recipe, comm).above(FP64) == {}
    fault(monkeypatch)
    assert what in compare(recipe, comm).above(1e-4)


@pytest.mark.mpi(2)
def test_a_norm_that_is_too_large_leaves_the_first_gradients_right(comm, monkeypatch):
    """A01: nothing but the norm shows it at first, then every weight does."""
    recipe = make_recipe(2, GPT, TP2)
    reference(recipe, steps=1)
    faults.count_on_every_rank(monkeypatch)
    found = compare(recipe, comm, steps=1).above(FP64)
    assert "grad_norm" in found
    assert not [name for name in found if name.startswith("gradients")]


@pytest.mark.mpi(2)
def test_turning_queries_and_keys_alike_is_no_fault(comm, monkeypatch):
    recipe = make_recipe(2, LLAMA, TP2, ONE_KV)
    reference(recipe)
    faults.shift_queries_and_keys(monkeypatch)
    assert compare(recipe, comm).above(FP64) == {}


# What `mpipar verify` says. The layout below has rows of K held twice.

BOTH = [LLAMA, TP2, ONE_KV, "train.micro_batch=8"]
VERDICTS = [
    (faults.skip_replicas, BOTH, {"step": 1, "kind": "gradients", "name": FIRST_K}),
    (faults.count_on_every_rank, BOTH, {"step": 1, "kind": "grad_norm", "name": None}),
    (faults.shift_queries, BOTH, {"step": 1, "kind": "loss", "name": None}),
]


@pytest.mark.parametrize(
    ("fault", "words", "first"), VERDICTS, ids=[f.__name__ for f, *_ in VERDICTS]
)
@pytest.mark.mpi(2)
def test_verify_names_the_first_difference(
    comm, tmp_path, monkeypatch, fault, words, first
):
    recipe = make_recipe(2, *words, f"data.source={write_tokens(comm, tmp_path)}")
    file = tmp_path / "verdict.json"
    assert run_verification(recipe, comm, steps=2) is True
    # Rank 0 runs the serial model with the same classes: the faults need several ranks.
    fault(monkeypatch)
    assert run_verification(recipe, comm, steps=2, json_path=file) is False
    if comm.rank == 0:
        verdict = json.loads(file.read_text())
        assert verdict["first_difference"] == first
        assert verdict["passed"] is False


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.mpi(2)
def test_verify_agrees_where_states_are_sharded(comm, tmp_path, stage):
    """Gradients that were looked at are those that the next step adds to."""
    source = f"data.source={write_tokens(comm, tmp_path)}"
    recipe = make_recipe(2, source, f"parallel.zero={stage}")
    assert run_verification(recipe, comm, steps=3) is True


@pytest.mark.mpi(2)
def test_verify_takes_recipes_of_gpus_and_16_bits(comm, tmp_path):
    words = ["train.device=auto", "train.precision=bf16", "train.attention=cudnn"]
    words += ["parallel.transport=staged", "optimizer.rounding=stochastic"]
    source = f"data.source={write_tokens(comm, tmp_path)}"
    assert run_verification(make_recipe(2, source, *words), comm, steps=1) is True


@pytest.mark.mpi(2)
def test_verify_tells_of_a_loss_that_is_no_number(comm, tmp_path, monkeypatch):
    recipe = make_recipe(2, f"data.source={write_tokens(comm, tmp_path)}")
    file = tmp_path / "verdict.json"
    faults.lose_the_loss(monkeypatch)
    assert run_verification(recipe, comm, steps=2, json_path=file) is False
    if comm.rank == 0:
        verdict = json.loads(file.read_text())
        first = {"step": 1, "kind": "loss", "name": None}
        assert verdict["first_difference"] == first
        # However it is written, it must not read as agreement.
        error = verdict["loss"]["relative_error"]
        assert not (isinstance(error, float) and error <= FP64)


@pytest.fixture
def verify(job, tmp_path):
    """Run `mpipar verify` on 2 ranks with a fault by name; (job, verdict or None)."""
    (tmp_path / "recipe.toml").write_text(TEXT)
    write_tokens(None, tmp_path)

    def run(fault: str, *words: str):
        file = tmp_path / "verdict.json"
        argv = ["verify", str(tmp_path / "recipe.toml"), "--json", str(file), *words]
        script = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
            "import pytest\nfrom mpipar.cli import main\nfrom parity import faults\n"
            f"patch = pytest.MonkeyPatch()\n{fault}\nsys.exit(main({argv}))"
        )
        done = job(2, sys.executable, "-c", script, timeout=90)
        return done, json.loads(file.read_text()) if file.exists() else None

    return run


def test_the_command_exits_with_0_where_all_agrees(verify):
    done, verdict = verify("", TP2, SP, "train.micro_batch=12")
    assert done.status == 0, done.output
    assert "PASSED" in done.output
    assert set(verdict) == {
        "passed", "tolerance", "layout", "loss", "grad_norm", "gradients", "weights",
        "first_difference",
    }  # fmt: skip
    assert verdict["passed"] is True
    assert verdict["first_difference"] is None
    assert verdict["layout"]["tp"] == 2
    assert verdict["layout"]["sequence"] is True
    for kind in ("gradients", "weights"):
        assert 0 < verdict[kind]["worst"]["relative_error"] <= FP64


@pytest.mark.parametrize(
    ("fault", "words", "kind", "name"),
    [
        ("skip_replicas", [TP2, SP], "gradients", "embedding.position.weight"),
        ("average_over_data", [], "gradients", "embedding.token.weight"),
        ("add_bias_on_every_rank", [TP2], "loss", None),
    ],
)
def test_the_command_exits_with_1_and_names_the_fault(verify, fault, words, kind, name):
    done, verdict = verify(f"faults.{fault}(patch)", *words)
    assert done.status == 1, done.output
    assert "FAILED" in done.output
    assert verdict["passed"] is False
    assert verdict["first_difference"]["kind"] == kind
    assert verdict["first_difference"]["name"] == name
    if name:
        assert name in done.output


def test_a_verdict_that_cannot_be_written_is_told_in_one_line(verify):
    done, verdict = verify("", "--json", "/nowhere/verdict.json")
    assert verdict is None
    assert done.status == 2
    assert done.output.count("cannot write --json /nowhere/verdict.json") == 1
    assert "Traceback" not in done.output
