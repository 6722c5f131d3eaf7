"""A keyed shuffle of [0, n) that needs no memory: the order of samples in an epoch."""

import numpy as np

# Six rounds mix well; two more cost nothing and help domains of a few bits
_ROUNDS = 8
_MASK64 = (1 << 64) - 1


def permuted(place: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Return the sample that stands at each place of each epoch's order.

    place   (k,) int64 in [0, n)
    epoch   (k,) int64, the epoch of each place
    Returns (k,) int64 in [0, n); for one (seed, epoch) a permutation of the places.
    Method  Feistel network over the next power of four, walking its cycle until the
            value falls below n (Black and Rogaway 2002): at most 4 walks on average.
    """
    half_bits = ((max(2, n) - 1).bit_length() + 1) // 2
    keys = _round_keys(seed, epoch)
    out = _encrypt(place.astype(np.uint64), keys, half_bits)
    while (outside := out >= n).any():
        out[outside] = _encrypt(out[outside], keys[:, outside], half_bits)
    return out.astype(np.int64)


def _round_keys(seed: int, epoch: np.ndarray) -> np.ndarray:
    seed_word = np.array([seed & _MASK64], dtype=np.uint64)
    epoch_word = _mixed(_mixed(seed_word) + epoch.astype(np.uint64))
    return _mixed(epoch_word + np.arange(_ROUNDS, dtype=np.uint64)[:, None])


def _encrypt(x: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return left << shift | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words (SplitMix64: Steele, Lea and Flood 2014)."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
