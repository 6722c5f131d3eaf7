"""What backward computes again: the same bits, and the bytes that the layers state."""

import numpy as np
import pytest
from parity.build import compare, layout_engine, make_batch, make_recipe, take_step
from parity.test_counts import BATCH, CONTEXT, WIDTH, count_step

MODES = ["selective", "full"]


def train(comm, *words: str) -> tuple[list[float], list[np.ndarray]]:
    """Losses and own values after two steps."""
    recipe = make_recipe(comm.size, *words)
    with layout_engine(recipe, comm) as engine:
        losses = [take_step(engine, make_batch(recipe, i)).loss for i in range(2)]
        return losses, [piece.data.copy() for piece in engine.state.pieces()]


LAYOUTS = [
    pytest.param(words, marks=pytest.mark.mpi(n))
    for n, words in (
        (1, []),
        (2, ["parallel.zero=3", "train.micro_batch=4"]),
        (2, ["parallel.tensor=2", "parallel.sequence=true"]),
        (4, ["parallel.tensor=2", "parallel.zero=3", "parallel.unit=2"]),
    )
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("words", LAYOUTS)
def test_every_bit_is_that_of_none(comm, words, family, precision, mode):
    words = [*words, f"model.family={family}", f"train.precision={precision}"]
    words += ["model.layers=3", "model.dropout=0.1"]
    losses, values = train(comm, *words)
    again_losses, again_values = train(comm, *words, f"train.recompute={mode}")
    assert losses == again_losses
    assert all(map(np.array_equal, values, again_values))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.mpi(2)
def test_recomputing_gives_the_serial_weights(comm, stage, mode):
    words = [f"parallel.zero={stage}", f"train.recompute={mode}", "model.dropout=0.1"]
    assert compare(make_recipe(2, *words), comm).above(1e-10) == {}


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("mode", ["none", *MODES])
@pytest.mark.parametrize(
    ("tp", "sequence"),
    [
        pytest.param(tp, sequence, marks=pytest.mark.mpi(tp))
        for tp, sequence in ((1, False), (2, False), (2, True), (4, True))
    ],
)
def test_saved_bytes_are_those_of_the_formula(comm, tp, sequence, mode, family):
    layers, words = 3, [f"parallel.tensor={tp}", f"model.family={family}"]
    words += [f"parallel.sequence={str(sequence).lower()}", "model.layers=3"]
    words += [f"train.recompute={mode}", "train.precision=fp32", "train.micro_batch=12"]
    _, engine = count_step(make_recipe(tp, *words), comm)
    first, *blocks, last = [
        unit.cost(BATCH // 2, CONTEXT).saved for unit in engine.model.units
    ]
    assert len(set(blocks)) == 1
    expected = first + sum(blocks) + last
    if mode == "full":
        stream = BATCH // 2 * CONTEXT * WIDTH * 4 // (tp if sequence else 1)
        turning = first + (layers - 1) * stream + blocks[0]
        expected = max(first + layers * stream + last, turning)
    assert engine.executor.peak_bytes == expected


@pytest.mark.mpi(1)
def test_each_mode_saves_less_than_the_one_before(comm):
    peaks = []
    for mode in ("none", *MODES):
        words = [f"train.recompute={mode}", "model.layers=6", "train.micro_batch=12"]
        _, engine = count_step(make_recipe(1, *words), comm)
        peaks.append(engine.executor.peak_bytes)
    assert peaks[0] > 1.3 * peaks[1] > 1.3 * 1.5 * peaks[2]
