"""The same training in PyTorch, JAX and mpipar, in turns on the same cores."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mpipar.bench.contestants import (
    MPIPAR,
    NAMES,
    TORCH,
    Contestant,
    Match,
    chosen,
    names_on,
)
from mpipar.bench.report import available_bytes, machine, write_json
from mpipar.bench.rival import NoAnswerError, Rival
from mpipar.bench.table import Table, result
from mpipar.bench.workload import (
    CONSTANT_RATE,
    check_vocabulary,
    random_batch,
    weight_count,
)
from mpipar.config import UNCUT, Recipe, find_recipe, read_recipe
from mpipar.config.write import toml_value
from mpipar.engine import Engine
from mpipar.errors import ConfigError
from mpipar.grid import serial_grid
from mpipar.ops import make_ops

DONE, DISAGREE = 0, 1
# Weights that other libraries are given, at most: a GiB takes some seconds.
SHARED_BYTES = 1 << 30
# What each contestant says of its own layout comes after these.
CHANGES = (
    *CONSTANT_RATE,
    "train.micro_batch=0",
    *(f"{key}={toml_value(value)}" for key, value in UNCUT.items()),
    "parallel.data=0",
)


def run_peers(
    recipe_name: str,
    overrides: Sequence[str],
    *,
    rounds: int = 7,
    names: Sequence[str] = (),
    python: str,
    json_path: Path | None = None,
) -> int:
    """Compare, print the table; 0, or 1 where losses show that the work differed.

    The global batch is one pass, cut over the data ranks alone, except in pipelines,
    which make it in micro-batches; the learning rate is constant; all start from the
    weights of mpipar's seed, unless those are too many to hand over (SHARED_BYTES);
    then each library draws its own, and losses are shown, not judged.

    names    contestants to run; none = all of the recipe's train.device
    python   the Python that has torch, and jax if that is to be compared
    Raises   ConfigError where nothing can be compared
    """
    changes = (*overrides, *CHANGES)
    path = find_recipe(recipe_name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = f"recipe {recipe_name} cannot be read: {error}"
        raise ConfigError([reason], "the command") from None
    given = read_recipe(text, overrides, path.parent)
    names = names or names_on(given.train.device)
    _check(given, rounds, names, python)
    common = (*changes, "train.precision=fp32", "train.device=cpu")
    recipe = read_recipe(text, common, path.parent, ranks=1)
    check_vocabulary(recipe)
    load, entered = os.getloadavg(), chosen(names)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="mpipar-bench-") as folder:
        batch = recipe.train.global_batch
        match = Match(recipe_name, changes, Path(folder), cores, python, batch)
        shared = _prepare(recipe, match.folder)
        race = _Race(match)
        try:
            for contestant in entered:
                race.enter(contestant)
            race.run(rounds)
        finally:
            race.end()
    tokens = recipe.train.global_batch * recipe.model.context
    results = {r.contestant.name: result(r, tokens) for r in race.running}
    table = Table(entered, results, race.reasons, judged=shared)
    table.show(f"{Path(recipe_name).stem}, {tokens} tokens a step, {len(cores)} cores")
    facts = machine() | {"load_before": load, "load_after": os.getloadavg()}
    facts["recipe"] = recipe.model_dump()
    write_json(json_path, facts | table.as_dict())
    if not results:
        raise ConfigError(["no contestant could run; see the table"], "the command")
    return DISAGREE if table.disagreeing else DONE


def _check(recipe: Recipe, rounds: int, names: Sequence[str], python: str) -> None:
    """Raises ConfigError with all that speaks against this comparison.

    recipe   as it was given, with nothing derived
    """
    wrong = [
        f'--peers has "{name}"; the contestants are {", ".join(NAMES)}'
        for name in names
        if name not in NAMES
    ]
    if rounds < 1:
        wrong.append(f"--rounds = {rounds} must be at least 1")
    if recipe.model.dropout:
        wrong.append(
            f"model.dropout = {recipe.model.dropout} draws other numbers in every "
            "library; try model.dropout=0"
        )
    batch, micro = recipe.train.global_batch, recipe.train.micro_batch
    if micro not in (0, batch):
        wrong.append(
            f"train.global_batch = {batch} is made in one pass here, but "
            f"train.micro_batch = {micro}; try train.global_batch={micro}"
        )
    if set(names) == set(names_on(recipe.train.device)) and not has_module(
        python, TORCH
    ):
        alone = ",".join(name for name in names if name.startswith(MPIPAR))
        wrong.append(
            f'torch cannot be imported by {python}: pip install "mpipar[bench]" there, '
            f"name another one by --torch-python, or time --peers={alone}"
        )
    if wrong:
        raise ConfigError(wrong, "the command")


def has_module(python: str, name: str) -> bool:
    """True where this Python finds a module of that name."""
    code = (
        f"import importlib.util, sys; sys.exit(not importlib.util.find_spec('{name}'))"
    )
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def _prepare(recipe: Recipe, folder: Path) -> bool:
    """Write what other libraries need: sizes, mpipar's initial weights, the batch.

    False where the weights are too many and left out.
    """
    (folder / "mpipar").symlink_to(Path(__file__).parents[1])
    (folder / "work.json").write_text(json.dumps(recipe.model_dump()))
    shared = 4 * weight_count(recipe) <= SHARED_BYTES
    weights = {}
    if shared:
        engine = Engine(recipe, serial_grid(), make_ops("cpu", "fp32"))
        weights = {p.name: p.data for p in engine.state.parameters}
    ids, labels = random_batch(recipe)
    np.savez(folder / "work.npz", ids=ids, labels=labels, **weights)
    return shared


class _Race:
    """Contestants that run, and why others do not."""

    def __init__(self, match: Match) -> None:
        self.match = match
        self.running: list[Rival] = []
        self.reasons: dict[str, str] = {}

    def enter(self, contestant: Contestant) -> None:
        """Start one more and wait for its warm-up; all others sleep."""
        rival = Rival(contestant, self.match)
        self.running.append(rival)
        with self._guard(rival):
            python, library = self.match.python, contestant.library
            if library != MPIPAR and not has_module(python, library):
                raise NoAnswerError(f"{library} is not installed for {python}")
            if reason := self.match.obstacle(contestant):
                raise NoAnswerError(reason)
            self._need_memory(rival)
            rival.start(self.match)

    def run(self, rounds: int) -> None:
        """All turns; the order alternates, so that nobody always follows the same."""
        for number in range(rounds):
            for rival in self.running[:: -1 if number % 2 else 1]:
                with self._guard(rival):
                    rival.turn()

    def end(self) -> None:
        """End all processes."""
        for rival in self.running:
            rival.end()

    @contextmanager
    def _guard(self, rival: Rival) -> Iterator[None]:
        """A contestant that fails leaves the race, and the others go on."""
        try:
            yield
        except NoAnswerError as reason:
            self.reasons[rival.contestant.name] = str(reason)
            self.running.remove(rival)
            rival.end()

    def _need_memory(self, rival: Rival) -> None:
        """All stay in memory until the end: swapping would time the disk."""
        need = max(
            (r.memory["start_peak"] for r in self.running if r != rival), default=0
        )
        left = available_bytes()
        if left < need:
            raise NoAnswerError(
                f"{left >> 20} MiB of memory are left, another one took {need >> 20}; "
                "choose fewer with --peers"
            )
