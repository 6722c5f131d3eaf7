"""What a worker of another library is told: its words, and the training to make.

This file needs numpy and the standard library alone.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Those libraries run these projections as one, rows one below the other.
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclass(frozen=True)
class Work:
    """The training that every contestant makes.

    recipe   its sections, as work.json holds them
    weights  mpipar's own by name, with joined projections
    ids, labels   the batch of every step (b, s)
    """

    recipe: Mapping[str, Any]
    weights: Mapping[str, np.ndarray]
    ids: np.ndarray
    labels: np.ndarray


def worker_arguments() -> argparse.ArgumentParser:
    """The words that all workers take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cores", required=True)
    return parser


def read_work(folder: Path, shards: int = 1) -> Work:
    """The work of a worker whose pipes are in this folder.

    shards   processes that cut a joined projection in equal runs of rows: each run
             holds that process's part of q, k and v
    """
    recipe = json.loads((folder.parent / "work.json").read_text())
    with np.load(folder.parent / "work.npz") as file:
        arrays = dict(file)
    ids, labels = arrays.pop("ids"), arrays.pop("labels")
    return Work(recipe, fuse(arrays, shards), ids, labels)


def fuse(weights: Mapping[str, np.ndarray], shards: int) -> dict[str, np.ndarray]:
    """These weights with the projections of FUSED joined, for so many processes."""
    whole = dict(weights)
    for joint, parts in FUSED.items():
        for name in [n for n in weights if f".{parts[0]}." in n]:
            above, kind = name.split(f".{parts[0]}.")
            taken = [whole.pop(f"{above}.{part}.{kind}") for part in parts]
            cuts = zip(*(np.split(part, shards) for part in taken), strict=True)
            rows = [rows for cut in cuts for rows in cut]
            whole[f"{above}.{joint}.{kind}"] = np.concatenate(rows)
    return whole
