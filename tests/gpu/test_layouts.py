"""Layouts on emulated GPUs, by the commands that users have, against one rank."""

import json

import pytest
from faults.run import RECIPE, SCRIPT
from gpu.emulator.path import environment
from gpu.shim.compile import GXX

pytestmark = [pytest.mark.skipif(GXX is None, reason="needs g++"), pytest.mark.full]

LAYOUTS = [
    (2, "parallel.tensor=2"),
    (2, "parallel.tensor=2 parallel.sequence=true model.dropout=0.1"),
    (2, "parallel.zero=1"),
    (2, "parallel.zero=2 train.micro_batch=1"),
    (2, "parallel.zero=3 parallel.prefetch=1"),
    (2, "parallel.pipeline=2 train.micro_batch=1"),
    (2, "parallel.context=2"),
    (2, "parallel.context=2 parallel.context_method=ulysses"),
    (4, "parallel.pipeline=2 parallel.tensor=2 parallel.schedule=zb-h1"),
    (4, "parallel.tensor=2 parallel.zero=3 model.family=llama model.kv_heads=1"),
    (2, "parallel.expert=2 model.family=llama experts.count=4 experts.active=2"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder where all jobs find the kernels that one of them has compiled."""
    return str(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(("ranks", "words"), LAYOUTS)
def test_layouts_agree_with_one_rank(job, tmp_path, compiled, ranks, words):
    """A27: all ranks are on one device."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "corpus.txt").write_text("".join(map(chr, range(32, 127))) * 60)
    file = tmp_path / "verdict.json"
    words = f"model.layers=2 train.device=cuda {words}"
    done = job(
        ranks, *SCRIPT, "verify", "--json", str(file), "recipe.toml", *words.split(),
        cwd=tmp_path, timeout=300, **environment(CUDA_SHIM_CACHE=compiled),
    )  # fmt: skip
    assert done.status == 0, done.output
    verdict = json.loads(file.read_text())
    assert verdict["passed"] and 0 < verdict["gradients"]["worst"]["relative_error"]
