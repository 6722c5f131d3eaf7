"""cupyx, emulated: arrays in pinned memory."""

import math

import numpy as np
from cupy.cuda import alloc_pinned_memory


def empty_pinned(shape, dtype=float, order="C"):
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    mem = alloc_pinned_memory(max(1, math.prod(shape)) * dtype.itemsize)
    count = math.prod(shape)
    flat = np.asarray(mem)[: count * dtype.itemsize].view(dtype)
    return flat.reshape(shape, order=order)


def zeros_pinned(shape, dtype=float, order="C"):
    out = empty_pinned(shape, dtype, order)
    out[...] = 0
    return out
