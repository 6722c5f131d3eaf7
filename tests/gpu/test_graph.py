"""Recorded passes give the numbers of passes that are told one by one."""

import pytest
from gpu.shim.compile import GXX
from gpu.test_memory import run

from mpipar.config import read_recipe
from mpipar.errors import ConfigError
from mpipar.ops import Ops

# Until the loss of a micro-batch stays on the device nothing can be recorded.
recorded = pytest.mark.skipif(
    GXX is None or not hasattr(Ops, "loss_sum"), reason="needs g++, and Ops.loss_sum"
)

BOTH = """
from parity.build import own_batches

SMALL = ["model.layers=1", "model.width=16", "model.ffn=16", "model.context=8"]
SMALL += ["train.global_batch=12", "train.micro_batch=6", "train.device=cuda"]

def train(*words):
    words = [*SMALL, "model.family=llama", "train.precision=bf16", *words]
    recipe = make_recipe(1, *words)
    engine = Engine(recipe, serial_grid(), make_ops("cuda", recipe.train.precision))
    scatter(engine)
    found, counts = [], []
    for number in (0, 1, 0, 1):
        batch, before = make_batch(engine.recipe, number), dict(streams.counts)
        step = engine.step(own_batches(engine, batch), count_valid(batch))
        found.append([step.loss, step.grad_norm])
        counts.append({k: n - before[k] for k, n in streams.counts.items()})
    weights = np.concatenate([p.data.get().reshape(-1) for p in engine.state.pieces()])
    return np.array(found), weights, counts, engine
"""

# Two kinds: the steps have other numbers of labels. The first micro-batch of each is
# worked on as ever, the second one recorded.
EQUAL = """
plain, weights, slow, other = train()
found, own, fast, engine = train("train.graph=true")
assert np.array_equal(plain, found) and np.array_equal(weights, own), (plain, found)
assert [n["graphs"] for n in slow] == [0] * 4
assert [n["graphs"] for n in fast] == [1, 1, 2, 2]
assert fast[-1]["launches"] < slow[-1]["launches"] / 3
assert fast[-1]["waits"] == slow[-1]["waits"] and fast[-1]["mallocs"] == 0
assert engine.executor.peak_bytes == other.executor.peak_bytes
print("equal")
"""


@recorded
def test_recorded_passes_give_the_same_bits():
    assert run(BOTH + EQUAL) == "equal\n"


FAULTS = """
from mpipar.errors import DeviceError
from mpipar.layers.loss import VocabLoss
from mpipar.pipeline import replay

def is_right():
    return np.array_equal(train("train.graph=true")[0], plain)

plain = train()[0]
# What a recording reads must be brought again for each micro-batch,
take, replay._Kind.take = replay._Kind.take, lambda self, x, step: None
print(is_right())
replay._Kind.take = take
print(is_right())
# and the host may not wait.
forward = VocabLoss.forward
VocabLoss.forward = lambda *given: (float(forward(*given)[0]), forward(*given)[1])
try:
    train("train.graph=true")
except DeviceError as error:
    print(error)
"""


@recorded
def test_what_a_recording_must_not_do_is_caught():
    stale, mended, refused = run(BOTH + FAULTS).splitlines()
    assert [stale, mended] == ["False", "True"]
    assert "cannot be recorded: cudaErrorStreamCapture" in refused


def test_what_cannot_be_recorded_is_refused_with_what_can():
    short = "[model]\nlayers = 4\nwidth = 64\nheads = 4\ncontext = 64\n"
    words = ["train.graph=true", "train.device=cuda"]
    assert read_recipe(short, words, ranks=2).train.graph
    wrong = [
        "parallel.pipeline=2", "parallel.tensor=2", "parallel.context=2",
        "model.dropout=0.1", "experts.count=4", "data.documents=separate",
        "parallel.zero=2",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        read_recipe(short, [*words, *wrong], ranks=16)
    told = caught.value.violations
    assert len(told) == len(wrong), told
    for word in wrong:
        key = word.partition("=")[0]
        assert any(text.startswith(key) and f"try {key} = " in text for text in told)
    with pytest.raises(ConfigError, match="other weights in each step"):
        read_recipe(short, [*words, "parallel.schedule=2bw"], ranks=1)
    with pytest.raises(ConfigError, match="needs a GPU"):
        read_recipe(short, [words[0], "train.device=cpu"], ranks=1)
