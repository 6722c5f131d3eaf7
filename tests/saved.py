"""Small states for tests of checkpoints: how they are saved, read and tampered with."""

import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint import (
    Facts,
    Fragment,
    Progress,
    Saved,
    Saver,
    load,
    read_manifest,
)
from mpipar.checkpoint.manifest import checksum
from mpipar.grid import serial_grid
from mpipar.ops import make_ops

OPS = make_ops("cpu", "fp64")
KINDS = ("weights", "m", "v")
SHAPES = {"embedding.token.weight": (7, 4), "blocks.0.mlp.up.weight": (6, 4),
          "blocks.0.norm1.gain": (4,)}  # fmt: skip
Shapes = Mapping[str, tuple[int, ...]]


def make_state(seed: int, shapes: Shapes = SHAPES) -> list[Fragment]:
    """Whole parameters with random weights and moments."""
    rng, made = np.random.default_rng(seed), []
    for name, shape in shapes.items():
        box = tuple((0, size) for size in shape)
        size = int(np.prod(shape))
        arrays = {kind: rng.normal(size=size) for kind in KINDS}
        made.append(Fragment(name, shape, box, 0, size, arrays))
    return made


def numbers(state: list[Fragment]) -> dict[str, np.ndarray]:
    """Copies of all arrays."""
    return {
        f"{kind} {f.name}": f.arrays[kind].copy() for f in state for kind in f.arrays
    }


def facts_of(step: int) -> Facts:
    """What a run of no importance says of itself."""
    progress = Progress(step=step, updates=step - 1, samples=4 * step)
    return Facts("a run", f"recipe of step {step}", "one rank", progress)


def make_saver(run: Path, *, keep: int = 0) -> Saver:
    """A saver of one rank."""
    return Saver(run, serial_grid().world, OPS, keep=keep)


def save(
    run: Path, step: int, seed: int = 0, *, keep: int = 0, shapes: Shapes = SHAPES
) -> Saved:
    """Save the state of a seed on one rank, with a saver of its own."""
    with make_saver(run, keep=keep) as saver:
        saver.begin(facts_of(step), make_state(seed, shapes), KINDS)
        return saver.finish()


def read(folder: Path, shapes: Shapes = SHAPES) -> dict[str, np.ndarray]:
    """All numbers of a checkpoint; NaN where nothing came."""
    state = make_state(99, shapes)
    for fragment in state:
        for array in fragment.arrays.values():
            array[...] = np.nan
    load(folder, read_manifest(folder), state, OPS)
    return numbers(state)


def is_of(folder: Path, seed: int, shapes: Shapes = SHAPES) -> bool:
    """True if a checkpoint has the state of this seed, to the bit."""
    found, exact = read(folder, shapes), numbers(make_state(seed, shapes))
    return found.keys() == exact.keys() and all(
        np.array_equal(found[name], exact[name]) for name in exact
    )


def tamper(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a manifest says, and give it a checksum that is right."""
    file = folder / "manifest.json"
    body = json.loads(file.read_text())["manifest"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    sum_ = checksum(text.encode())
    file.write_text(f'{{"checksum":"{sum_}","manifest":{text}}}\n')


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def in_child(work: Callable[[], Any], timeout: float = 20) -> int:
    """How a copy of this process ends that does some work, as `os.wait` tells it.

    0 after the work, 256 after an exception, −1 if it had to be ended for being late.
    """
    with warnings.catch_warnings():
        # Threads of the parent are not there in the child, and not needed either.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1
