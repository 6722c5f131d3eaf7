"""Loads a checkpoint and continues a prompt, token by token."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint import (
    Manifest,
    find_checkpoint,
    load,
    read_manifest,
    whole_fragments,
)
from mpipar.comm import raise_together
from mpipar.config import UNCUT, Recipe, read_recipe, replace, resolve
from mpipar.data import Tokenizer, check_ids
from mpipar.engine import load_vocabulary, open_grid
from mpipar.errors import CheckpointError, ConfigError, DataError, MpiparError
from mpipar.generate.sample import draw
from mpipar.layers.base import Step
from mpipar.layers.cache import KeyValueCache
from mpipar.models import build_model
from mpipar.zero.flat import FlatState


def run_generation(
    checkpoint: Path,
    world: Any,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    overrides: Sequence[str] = (),
) -> None:
    """Prints the prompt and up to `tokens` more, as they are drawn, on rank 0.

    All ranks of world form one tensor-parallel group. Generation ends where the model's
    context is full.
    Raises   ConfigError or CheckpointError on all ranks together
    """
    _check(tokens, temperature, top_k)
    folder, manifest, recipe = _open(checkpoint, world, overrides)
    grid, ops = open_grid(recipe, world)
    with grid:
        recipe, tokenizer = load_vocabulary(recipe, grid.world)
        ids = _encode(prompt, tokenizer, recipe.model, grid.world)
        model = build_model(
            recipe.model, ops=ops, tp=grid.tp, sequence=False, experts=recipe.experts
        )
        flat = FlatState(model.groups().parameters, ops, gradients=False)
        _load(folder, manifest, flat, grid)
        stream = generate(
            model, ops, ids, recipe.model.context,
            tokens=tokens, temperature=temperature, top_k=top_k, seed=seed,
        )  # fmt: skip
        shown = _Printer(tokenizer, prompt, ids, speaks=grid.world.rank == 0)
        for token in stream:
            shown.add(token)
        room = recipe.model.context - len(ids)
        shown.close("context full" if tokens > room else None)


def generate(
    model: Any,
    ops: Any,
    ids: np.ndarray,
    context: int,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """New token ids after `ids` (n,), until `tokens` of them or the context is full."""
    cache = KeyValueCache(context, ops=ops)
    fresh = ids
    for position in range(ids.size, min(ids.size + tokens, context)):
        positions = np.arange(cache.length, cache.length + fresh.size)
        step = Step(
            positions=ops.asarray(positions),
            samples=ops.asarray(np.zeros(1, np.int64)),
            training=False,
            cache=cache,
        )
        logits = ops.to_host(model.logits(ops.asarray(fresh[None, :]), step))[0]
        if np.isnan(logits).any():
            raise _agreed(CheckpointError("the model's logits are not numbers (NaN)"))
        token = draw(
            logits, temperature=temperature, top_k=top_k, seed=seed, position=position
        )
        yield token
        fresh = np.array([token], np.int64)


def _check(tokens: int, temperature: float, top_k: int) -> None:
    values = {"--tokens": tokens, "--temperature": temperature, "--top-k": top_k}
    wrong = [
        f"{key} = {value} must be a finite number, 0 or above"
        for key, value in values.items()
        if not 0 <= value < math.inf
    ]
    if wrong:
        raise _agreed(ConfigError(wrong, title="the command"))


def _agreed(error: MpiparError) -> MpiparError:
    """Every rank finds this error by itself."""
    error.agreed = True
    return error


def _open(
    checkpoint: Path, world: Any, overrides: Sequence[str]
) -> tuple[Path, Manifest, Recipe]:
    """The checkpoint, and the recipe for generation on all ranks of world."""
    found: tuple[Path, Manifest] | MpiparError | None = None
    if world.rank == 0:
        try:
            folder = find_checkpoint(checkpoint)
            found = folder, read_manifest(folder)
        except MpiparError as error:
            found = error
        except OSError as error:
            found = CheckpointError(f"cannot read {checkpoint}: {error}")
    found = world.bcast(found)
    if isinstance(found, MpiparError):
        raise _agreed(found)
    folder, manifest = found
    try:
        recipe = read_recipe(manifest.recipe, overrides)
        layout = {
            **UNCUT,
            "parallel.tensor": world.size,
            "train.global_batch": 1,
            "train.micro_batch": 1,
            "log.progress": "none",
        }
        recipe = resolve(replace(recipe, layout), world.size)
    except ConfigError as error:
        raise _agreed(error) from None
    return folder, manifest, recipe


def _encode(prompt: str, tokenizer: Tokenizer, model: Any, world: Any) -> np.ndarray:
    """Ids of the prompt; of the end-of-document mark where it is empty."""
    ids, error = np.empty(0, np.int64), None
    try:
        ids = np.asarray(tokenizer.encode(prompt), np.int64)
        if ids.size == 0 and tokenizer.end_id is not None:
            ids = np.array([tokenizer.end_id], np.int64)
        check_ids(ids, model.vocab, "--prompt")
        if not 0 < ids.size <= model.context:
            problem = f"--prompt has {ids.size} tokens, not 1 to {model.context}"
            error = ConfigError(
                [f"{problem}, the model's context"], title="the command"
            )
    except DataError as problem:
        error = problem
    raise_together(error, world)
    return ids


def _load(folder: Path, manifest: Manifest, flat: FlatState, grid: Any) -> None:
    error: Exception | None = None
    try:
        load(folder, manifest, whole_fragments(flat.parameters), flat.ops)
    except (MpiparError, OSError) as problem:
        error = problem
    raise_together(error, grid.world)


class _Printer:
    """Prints text as soon as its bytes are whole characters.

    The prompt's ids are decoded together with the new ones, whose first may begin with
    a space that a decoder drops at the start of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, ids: np.ndarray, *, speaks: bool
    ) -> None:
        self.tokenizer, self.speaks = tokenizer, speaks
        self._ids = ids.tolist()
        self._shown = len(tokenizer.decode(ids))
        self._put(prompt)

    def add(self, token: int) -> None:
        """One more token."""
        self._ids.append(token)
        text = self.tokenizer.decode(np.array(self._ids))
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._put(text[self._shown :])
            self._shown = len(text)

    def close(self, reason: str | None) -> None:
        """The rest of the text, and why it ended early."""
        text = self.tokenizer.decode(np.array(self._ids))
        self._put(text[self._shown :] + "\n")
        if reason is not None:
            self._put(f"[{reason}]\n")

    def _put(self, text: str) -> None:
        if self.speaks:
            print(text, end="", flush=True)
