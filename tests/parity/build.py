"""What the parity tests share: recipes, batches, the serial run, and the comparison.

The comparison is not that of `mpipar verify`, which is under test itself.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpipar.checkpoint import Facts, Progress, Saver
from mpipar.config import Recipe, read_recipe, replace, resolve, to_toml
from mpipar.data import IGNORE, Batch
from mpipar.engine import Engine, open_engine, open_grid
from mpipar.engine.experts import bias_moves
from mpipar.engine.learning_rate import learning_rate
from mpipar.grid import serial_grid
from mpipar.layers.parameter import Parameter
from mpipar.ops import make_ops

STEPS = 3
FP64, FP32 = 1e-10, 1e-4
# A file of tokens may have any vocabulary; most tests bring their own batches instead.
# Adam moves a weight by lr · sign(gradient) at first, which is rounding alone where the
# gradient is: an eps above that rounding makes a step continuous in its gradients.
TEXT = """
[model]
layers = 2
width = 32
heads = 4
ffn = 64
context = 16
vocab = 101
[data]
source = "tokens.npy"
[train]
steps = 6
global_batch = 24
precision = "fp64"
device = "cpu"
seed = 3
clip = 0.5
[optimizer]
lr = 0.01
eps = 1e-5
warmup = 2
[log]
timeout_s = 60.0
progress = "none"
"""


def make_recipe(ranks: int, *changes: str) -> Recipe:
    """The small model with changes such as "model.tied=false", resolved for ranks."""
    return read_recipe(TEXT, changes, ranks=ranks)


def serial_recipe(recipe: Recipe) -> Recipe:
    """The same training on one rank, the whole global batch at once."""
    alone = {
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.schedule": "1f1b",
        "parallel.chunks": 1,
        "parallel.partition": "even",
        "parallel.context": 1,
        "parallel.context_method": "zigzag",
        "parallel.ulysses": 0,
        "parallel.expert": 1,
        "parallel.expert_tensor": 0,
        "parallel.expert_overlap": False,
        "parallel.data": 1,
        "parallel.sequence": False,
        "parallel.order": ("tp", "cp", "dp", "pp"),
        "parallel.bucket_mb": 25.0,
        "parallel.zero": 0,
        "train.recompute": "none",
        "parallel.zero_shard": 0,
        "parallel.unit": 1,
        "train.micro_batch": recipe.train.global_batch,
    }
    return resolve(replace(recipe, alone), 1)


# Batches


def make_batch(recipe: Recipe, step: int) -> Batch:
    """A whole step's batch; some labels, and all of sequence 1, do not count."""
    rng = np.random.default_rng([7, step])
    shape = (recipe.train.global_batch, recipe.model.context)
    tokens = rng.integers(0, recipe.model.vocab, shape)
    labels = rng.integers(0, recipe.model.vocab, shape)
    labels[rng.random(shape) < 0.2] = IGNORE
    labels[1:2] = IGNORE
    return Batch(tokens, labels, np.arange(shape[0]) + step * shape[0])


def count_valid(batch: Batch) -> int:
    return int((batch.labels != IGNORE).sum())


def cut_batch(batch: Batch, micro: int, rank: int = 0, ranks: int = 1) -> list[Batch]:
    """The micro-batches of one data rank."""
    own = len(batch.samples) // ranks
    starts = range(rank * own, (rank + 1) * own, micro)
    parts = [slice(start, start + micro) for start in starts]
    return [Batch(batch.tokens[p], batch.labels[p], batch.samples[p]) for p in parts]


def own_batches(engine: Engine, batch: Batch) -> list[Batch]:
    """What this rank is fed of a whole step's batch."""
    dp = engine.grid.dp
    return cut_batch(batch, engine.recipe.train.micro_batch, dp.rank, dp.size)


def take_step(engine: Engine, batch: Batch) -> Any:
    return engine.step(own_batches(engine, batch), count_valid(batch))


def update(engine: Engine, step: int, norm: float) -> None:
    """What a step does on one rank with gradients that are complete."""
    rate = learning_rate(engine.recipe, step)
    assert engine.optimizer.update(rate, norm)
    moves = bias_moves(engine.loads, engine.recipe.experts.bias_rate)
    engine.optimizer.move(moves)


def write_tokens(comm: Any, folder: Path, count: int = 2400) -> Path:
    """A file of tokens below 101, the same for all ranks; comm None writes it alone."""
    file = folder / "tokens.npy"
    if comm is None or comm.rank == 0:
        rng = np.random.default_rng(5)
        np.save(file, rng.integers(0, 101, count).astype(np.uint8))
    return file if comm is None else comm.bcast(file)


# Engines


def scatter(engine: Engine) -> None:
    """Move every weight, so that gains are not all 1 and biases not all 0.

    The moves depend on the name and the global index alone.
    """
    for state in engine.states:
        for parameters in state.whole_units("values"):
            for p in parameters:
                rng = np.random.default_rng(zlib.crc32(p.name.encode()))
                moves = 0.1 * rng.standard_normal(p.shape)[region(p)]
                p.data += engine.ops.asarray(moves)


def region(p: Parameter) -> tuple[slice, ...]:
    """This rank's box as an index of the whole array."""
    return tuple(slice(lo, hi) for lo, hi in p.box)


def serial_engine(recipe: Recipe) -> Engine:
    """A scattered engine of the recipe's model on one rank."""
    alone = serial_recipe(recipe)
    engine = Engine(alone, serial_grid(), make_ops("cpu", recipe.train.precision))
    scatter(engine)
    return engine


@contextmanager
def layout_engine(recipe: Recipe, comm: Any) -> Iterator[Engine]:
    """A scattered engine of the recipe on the ranks of comm. Collective."""
    grid, ops = open_grid(recipe, comm)
    with grid:
        engine = open_engine(recipe, grid, ops)
        scatter(engine)
        yield engine


def weights(engine: Engine) -> dict[str, np.ndarray]:
    return {p.name: p.data.copy() for p in engine.state.parameters}


def gradients(engine: Engine) -> dict[str, np.ndarray]:
    return {p.name: p.grad.copy() for p in engine.state.parameters}


# Checkpoints


def save_engine(engine: Engine, run: Path) -> Path:
    """A checkpoint of what the ranks of an engine hold. Collective."""
    scale = engine.loss_scale
    progress = Progress(
        step=engine.number,
        updates=engine.optimizer.count,
        samples=engine.number * engine.recipe.train.global_batch,
        loss_scale=scale.value,
        good_steps=scale.good,
        open_scale=engine.open_scale,
    )
    facts = Facts("a run", to_toml(engine.recipe), engine.grid.describe(), progress)
    with Saver(run, engine.grid.world, engine.ops) as saver:
        saver.begin(facts, engine.fragments(share=True), engine.saved_kinds)
        saved = saver.finish()
    assert saved.error is None, saved.error
    return saved.folder


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """What any HDF5 tool sees of a checkpoint, such as m/blocks/0/norm1/gain; the
    weights have no such prefix."""
    found = {}

    def keep(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            found[name] = node[()]

    for name in ("model.h5", "optimizer.h5"):
        with h5py.File(folder / name) as file:
            file.visititems(keep)
    return found


@contextmanager
def first_ranks(comm: Any, n: int) -> Iterator[Any]:
    """A communicator of the first n ranks; None on the others. Collective."""
    part = comm.Split(int(comm.rank >= n), comm.rank)
    yield part if comm.rank < n else None
    part.Free()


# The serial run, and the comparison


@dataclass(frozen=True)
class Reference:
    """What the serial model did: whole arrays by name."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]
    idle: set[str]


@cache
def _reference(text: str, steps: int) -> Reference:
    recipe = read_recipe(text, ranks=1)
    engine = serial_engine(recipe)
    losses, norms, grads = [], [], []
    for step in range(steps):
        result = take_step(engine, make_batch(recipe, step))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        grads.append(gradients(engine))
    idle = set.intersection(*(find_idle(g) for g in grads))
    return Reference(losses, norms, grads, weights(engine), idle)


def reference(recipe: Recipe, steps: int = STEPS) -> Reference:
    """The serial run of a recipe; made once for all layouts of a launch."""
    return _reference(to_toml(serial_recipe(recipe)), steps)


@dataclass
class Errors:
    """The largest relative error of each kind, over all ranks and steps."""

    loss: float
    grad_norm: float
    gradients: dict[str, float]
    weights: dict[str, float]

    def above(self, tolerance: float) -> dict[str, float]:
        """What differs by more than the tolerance, or is no number."""
        found = {"loss": self.loss, "grad_norm": self.grad_norm}
        for kind in ("gradients", "weights"):
            found |= {f"{kind} {n}": e for n, e in getattr(self, kind).items()}
        return {name: e for name, e in found.items() if not e <= tolerance}


def compare(
    recipe: Recipe,
    comm: Any,
    plant: Callable[[Engine], None] = lambda engine: None,
    steps: int = STEPS,
) -> Errors:
    """Train a layout and compare all that the serial run gave; equal on all ranks.

    plant   changes the layout's engine before the first step
    """
    exact = reference(recipe, steps)
    errors = Errors(0.0, 0.0, {}, {})
    with layout_engine(recipe, comm) as engine:
        plant(engine)
        for step in range(steps):
            result = take_step(engine, make_batch(recipe, step))
            grads = exact.gradients[step]
            # Two equal tokens, say, leave queries and keys idle in one step alone.
            found = box_errors(engine, "gradients", grads, find_idle(grads))
            errors.gradients = _largest([errors.gradients, found])
            errors.loss = worse(errors.loss, off(result.loss, exact.losses[step]))
            norm = off(result.grad_norm, exact.norms[step])
            errors.grad_norm = worse(errors.grad_norm, norm)
        errors.weights = box_errors(engine, "values", exact.weights, exact.idle)
    return agree(errors, comm)


def agree(errors: Errors, comm: Any) -> Errors:
    """The largest over all ranks, so that all pass or all fail."""
    every = comm.allgather(errors)
    return Errors(
        worse(*(e.loss for e in every)),
        worse(*(e.grad_norm for e in every)),
        _largest([e.gradients for e in every]),
        _largest([e.weights for e in every]),
    )


def box_errors(
    engine: Engine, kind: str, exact: dict[str, np.ndarray], idle: set[str]
) -> dict[str, float]:
    """‖own box − its part of the exact array‖ / ‖exact array‖, for every parameter.

    An idle tensor, whose gradient is zero but for rounding, is judged by the norm of
    its layer. In fp32 Adam blows that rounding up to whole updates: left out.
    """
    found = {}
    for parameters in engine.state.whole_units(kind):
        for p in parameters:
            own = engine.ops.to_host(p.data if kind == "values" else p.grad)
            scale = np.linalg.norm(exact[p.name])
            if p.name in idle:
                if kind == "values" and own.dtype == np.float32:
                    continue
                scale = layer_norm(p.name, exact)
            difference = np.linalg.norm(own - exact[p.name][region(p)])
            found[p.name] = float(difference / scale if scale else difference)
    return found


def find_idle(grads: dict[str, np.ndarray]) -> set[str]:
    """Tensors whose gradient is only rounding beside that of their layer.

    Without RoPE all keys may move together, so the key bias has no gradient; with one
    position neither queries nor keys have any. Without labels nothing has.
    """
    return {
        name
        for name, x in grads.items()
        if np.linalg.norm(x) <= 100 * np.finfo(x.dtype).eps * layer_norm(name, grads)
    }


def layer_norm(name: str, arrays: dict[str, np.ndarray]) -> float:
    """Norm of all arrays of the layer that a tensor belongs to."""
    layer = name.rsplit(".", 2)[0] + "."
    norms = [np.linalg.norm(x) for n, x in arrays.items() if n.startswith(layer)]
    return float(np.linalg.norm(norms))


def off(value: float, exact: float) -> float:
    return abs(value - exact) / (abs(exact) or 1.0)


def worse(*errors: float) -> float:
    """The largest; NaN counts as larger than any number."""
    return float(np.max(errors))


def _largest(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name for table in tables for name in table}
    return {n: worse(*(t[n] for t in tables if n in t)) for n in sorted(names)}
