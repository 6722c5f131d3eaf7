"""Small arrays of the host that layers ask for again and again, kept on the device."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
MOST = 64  # kept by what they hold


class Kept:
    """What `make` makes of host arrays that nobody changes, made once for equal ones.

    An array is known by itself while it lives, and by what it holds while it is among
    the last MOST that were asked for.
    """

    def __init__(self, make: Callable[[np.ndarray], Any]) -> None:
        self.make = make
        self._of_array: dict[int, tuple[weakref.ref, Any]] = {}
        self._of_bytes: OrderedDict[tuple, Any] = OrderedDict()

    def __call__(self, host: np.ndarray) -> Any:
        known = self._of_array.get(id(host))
        if known is not None and known[0]() is host:
            return known[1]
        name = host.dtype.str, host.shape, host.tobytes()
        if name not in self._of_bytes:
            self._of_bytes[name] = self.make(host)
            if len(self._of_bytes) > MOST:
                self._of_bytes.popitem(last=False)
        self._of_bytes.move_to_end(name)
        made, place = self._of_bytes[name], id(host)
        gone = weakref.ref(host, lambda _: self._of_array.pop(place, None))
        self._of_array[place] = gone, made
        return made


@dataclass(slots=True)
class DeviceSpans:
    """Spans of keys as kernels take them: int32 (b or 1, s), and items from those of a
    sequence to those of the next.

    window      w where query i of every sequence sees keys i − w + 1 … i, s where it
                sees keys 0 … i; else 0
    reaches     by the number of keys: queries [first, last) that see any of each
                FLASH_ROWS of them, and items from those of a sequence to the next's
    """

    begin: Array
    end: Array
    count: Array
    step: np.int64
    window: int
    reaches: dict[int, tuple[Array, Array, np.int64]]


def device_spans(xp: Any, host: np.ndarray) -> DeviceSpans:
    """Spans (3, b or 1, s) of the host on the device."""
    begin, end, count = xp.asarray(np.ascontiguousarray(host, np.int32))
    step = np.int64(begin.shape[1] if len(begin) > 1 else 0)
    return DeviceSpans(begin, end, count, step, _window(host), {})


def _window(spans: np.ndarray) -> int:
    """How many positions each query sees, where it is its own and those before it."""
    places = np.arange(spans.shape[2])
    window = places.size - int(spans[0, 0, -1])
    begin = np.maximum(places - window + 1, 0)
    fits = (spans[0] == begin).all() and (spans[1] == places + 1).all()
    return window if fits else 0
