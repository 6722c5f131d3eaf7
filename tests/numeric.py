"""Comparisons and finite differences for tests."""

from collections.abc import Callable
from typing import Any

import numpy as np


def assert_close(actual: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Largest difference at most `tolerance` times the largest expected value."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, {expected.shape}"
    if expected.size == 0:
        return
    scale = np.abs(expected).max()
    error = np.abs(actual.astype(np.float64) - expected).max()
    assert error <= tolerance * scale, f"{what}: off by {error:.3g} of {scale:.3g}"


def numeric_gradient(
    value: Callable[[], float], x: np.ndarray, step: float = 1e-4
) -> np.ndarray:
    """Fourth-order differences of value(), which reads x, by every element of x."""
    gradient = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        kept, found = x[place], []
        for shift in (-2, -1, 1, 2):
            x[place] = kept + shift * step
            found.append(value())
        x[place] = kept
        gradient[place] = (found[0] - found[3]) + 8 * (found[2] - found[1])
    return gradient / (12 * step)


class Draw:
    """Equal numbers for every caller, rounded to float32 so that both types agree."""

    def __init__(self, dtype, size):
        self.dtype, (self.b, self.s, self.width) = dtype, size
        self.rng = np.random.default_rng(5)

    def __call__(self, *shape):
        return self.rng.standard_normal(shape).astype("float32").astype(self.dtype)

    def rows(self, width=0):
        return self(self.b, self.s, width or self.width)

    def halves(self):
        fused = self.rows(2 * self.width)
        return fused[..., : self.width], fused[..., self.width :]

    def ids(self, low, high):
        return self.rng.integers(low, high, (self.b, self.s))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 rounded to bf16, halves to even; NaN stays NaN."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_half(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 numbers rounded to "bf16" (bits) or "fp16"."""
    if kind == "bf16":
        return to_bf16(x)
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def from_half(x: np.ndarray) -> np.ndarray:
    """The float32 numbers of a 16-bit array; others as they are."""
    if x.dtype == np.uint16:
        return from_bf16(x)
    return x.astype(np.float32) if x.dtype == np.float16 else x
