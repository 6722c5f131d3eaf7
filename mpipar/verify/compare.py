"""Relative errors of named tensors, and the judgement over them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpipar.engine import finite

# A tensor this much smaller than its layer is an exact zero plus rounding: softmax does
# not change when all keys move together, so a key bias has no gradient without RoPE.
ZERO_SHARE = 1e-9


@dataclass
class Comparison:
    """Errors of one kind of tensor ("gradients" or "weights") over all steps.

    errors   the largest error of each tensor;  count  comparisons made
    """

    errors: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, name: str, error: float) -> None:
        """Notes the error of one tensor in one step; NaN is larger than any number."""
        self.count += 1
        self.errors[name] = larger(self.errors.get(name, 0.0), error)

    def worst(self, most: int) -> list[tuple[str, float]]:
        """(name, error) of the tensors that differ most, NaN first."""
        rank = {n: math.inf if math.isnan(e) else e for n, e in self.errors.items()}
        names = sorted(rank, key=rank.get, reverse=True)[:most]
        return [(name, self.errors[name]) for name in names]

    def as_dict(self) -> dict[str, Any]:
        """{"worst": {"name", "relative_error"}, "count"}"""
        name, error = self.worst(1)[0] if self.errors else (None, 0.0)
        worst = {"name": name, "relative_error": finite(error)}
        return {"worst": worst, "count": self.count}


def larger(known: float, error: float) -> float:
    """The larger of two errors; once NaN, always NaN."""
    return known if math.isnan(known) or known >= error else error


def relative(value: float, exact: float) -> float:
    """|value − exact| / |exact|, or the plain difference where exact is 0."""
    difference = abs(value - exact)
    return difference / abs(exact) if exact else difference


def tensor_errors(
    tensors: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> Iterator[tuple[str, float]]:
    """(name, ‖a − b‖ / ‖b‖) of every tensor, in the order of `exact`.

    A tensor that is zero but for rounding is judged against the norm of its layer.
    A missing tensor or one with another shape has an infinite error.
    """
    layers: dict[str, float] = {}
    for name, b in exact.items():
        layers[_layer(name)] = layers.get(_layer(name), 0.0) + _square(b)
    for name, b in exact.items():
        a = tensors.get(name)
        if a is None or a.shape != b.shape:
            yield name, float("inf")
            continue
        norm, layer = _square(b) ** 0.5, layers[_layer(name)] ** 0.5
        scale = norm if norm > ZERO_SHARE * layer else layer
        difference = _square(a - b) ** 0.5
        yield name, difference / scale if scale else difference


def _layer(name: str) -> str:
    """blocks.3.attention of blocks.3.attention.k.bias."""
    return name.rsplit(".", 2)[0]


def _square(x: np.ndarray) -> float:
    flat = x.reshape(-1).astype(np.float64)
    return float(flat @ flat)
