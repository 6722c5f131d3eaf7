"""Times of work on a device."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

# No power of two, so that rows differ
DRAWN = 1_000_003


def seconds(
    ops: Any, act: Callable[[], Any], repeats: int = 10, warm: int = 3
) -> float:
    """Median seconds of act() on the device's current stream, by events."""
    cuda = ops.xp.cuda
    for _ in range(warm):
        act()
    found = []
    for _ in range(repeats):
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        act()
        end.record()
        end.synchronize()
        found.append(cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(found)


def normal(ops: Any, shape: tuple[int, ...], dtype: Any = None, seed: int = 0) -> Any:
    """Random numbers, of the compute type unless said: DRAWN ones over and over."""
    drawn = np.random.default_rng(seed).standard_normal(DRAWN, np.float32)
    out = ops.xp.empty(shape, ops.dtype if dtype is None else dtype)
    flat = out.reshape(-1)
    filled = min(DRAWN, flat.size)
    ops.store(ops.asarray(drawn[:filled].astype(ops.dtype)), flat[:filled])
    while filled < flat.size:
        more = min(filled, flat.size - filled)
        flat[filled : filled + more] = flat[:more]
        filled += more
    return out


def copy_rate(ops: Any, size: int) -> float:
    """Bytes read and written in a second by a copy of so many bytes."""
    x = ops.xp.zeros(size, ops.xp.uint8)
    y = ops.xp.empty_like(x)
    return 2 * size / seconds(ops, lambda: ops.xp.copyto(y, x))
