"""The known values of a recipe, and those that follow from others."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from mpipar.config.fields import replace
from mpipar.config.recipe import SECTIONS, Recipe
from mpipar.config.schedules import NEEDS
from mpipar.config.write import shown

# Fields whose 0 stands for a value that follows from others.
DERIVED = (
    "model.kv_heads",
    "model.ffn",
    "model.vocab",
    "experts.ffn",
    "parallel.data",
    "parallel.expert_tensor",
    "parallel.chunks",
    "train.micro_batch",
)


# Axes that cut the model or a sequence: data replicas are what is left of the ranks
MODEL_AXES = ("parallel.tensor", "parallel.context", "parallel.pipeline")


class Values(dict[str, Any]):
    """Values by dotted key, and the number of "ranks"; unknown ones are absent.

    derived  the keys that the recipe left to 0 and that are filled in here
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Start from known values, none of them derived."""
        super().__init__(values)
        self.derived: set[str] = set()

    @classmethod
    def of(cls, recipe: Recipe) -> Values:
        """All the values of a recipe, as they are written."""
        return cls(
            {
                f"{section}.{name}": value
                for section in SECTIONS
                for name, value in getattr(recipe, section)
            }
        )

    def say(self, key: str) -> str:
        """'model.ffn = 256 (derived)', for a message."""
        note = " (derived)" if key in self.derived else ""
        return f"{key} = {shown(self[key])}{note}"

    def resolved(self, recipe: Recipe) -> Recipe:
        """The recipe with the derived values in it."""
        return replace(recipe, {key: self[key] for key in self.derived})


def fill(known: Mapping[str, Any], ranks: int | None) -> Values:
    """Fill in each derived 0; those that do not follow yet become absent."""
    values = Values(known)
    if ranks is not None:
        values["ranks"] = ranks
    for key in DERIVED:
        if values.get(key) == 0:
            del values[key]
            derived = _derive(key, values)
            if derived is not None:
                values[key] = derived
                values.derived.add(key)
    return values


def _derive(key: str, v: Values) -> int | None:
    """The value that `key` takes when it is left to 0; None while it is unknown."""
    match key:
        case "model.kv_heads":
            return v.get("model.heads")
        case "model.ffn" if "model.width" in v and "model.family" in v:
            return _inner_width(v["model.family"], v["model.width"])
        case "model.vocab" if v.get("data.tokenizer") == "bytes":
            return 256
        case "experts.ffn" if v.get("experts.count"):
            return v.get("model.ffn")
        case "parallel.expert_tensor" if v.get("experts.count"):
            return v.get("parallel.tensor")
        case "parallel.data" if all(axis in v for axis in MODEL_AXES):
            return _whole(v.get("ranks"), prod(v[axis] for axis in MODEL_AXES))
        case "parallel.chunks" if v.get("parallel.schedule") in NEEDS:
            return NEEDS[v["parallel.schedule"]].chunks[0]
        case "train.micro_batch":
            own = _whole(v.get("train.global_batch"), v.get("parallel.data"))
            return own and own // _micro_batches(own, v.get("parallel.pipeline", 1))
    return None


def _inner_width(family: str, width: int) -> int:
    """Width of the MLP: llama's three matrices hold as much as gpt's two."""
    return 4 * width if family == "gpt" else -(-8 * width // 96) * 32


def _micro_batches(sequences: int, stages: int) -> int:
    """As many micro-batches as divide the sequences, up to four for each stage."""
    most = 4 * stages if stages > 1 else 1
    return next(n for n in range(min(most, sequences), 0, -1) if sequences % n == 0)


def _whole(n: int | None, parts: int | None) -> int | None:
    return n // parts if n and parts and n % parts == 0 else None
