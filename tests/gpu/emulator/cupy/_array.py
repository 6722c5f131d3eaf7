"""Arrays in emulated device memory."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy.cuda import memory, streams

# Which pass all their work to the host, where it is waited for
_SEEN_BY_HOST = {"flatnonzero", "nonzero", "unique", "array_equal"}
# Which write into the first array that they are given
_INTO_FIRST = {"copyto", "put_along_axis"}


class ndarray:
    """An array like cupy.ndarray; `host` is NumPy's view of the emulated memory."""

    __slots__ = ("__weakref__", "_memory", "base", "host")
    __array_priority__ = 100

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: memory.MemoryPointer | None = None,
        strides: Any = None,
    ) -> None:
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        dtype = np.dtype(dtype)
        if memptr is None:
            memptr = memory.alloc(math.prod(shape) * dtype.itemsize)
        self._memory, self.base = memptr, None
        size = max(1, memptr.mem.size - (memptr.ptr - memptr.mem.ptr))
        raw = memory.bytes_at(memptr.ptr, size)
        self.host = np.ndarray(shape, dtype, raw, strides=strides)

    # --- facts ------------------------------------------------------------------------

    dtype = property(lambda self: self.host.dtype)
    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    flags = property(lambda self: self.host.flags)
    T = property(lambda self: self._view(self.host.T))

    @property
    def data(self) -> memory.MemoryPointer:
        mem = self._memory.mem
        return memory.MemoryPointer(mem, self.host.ctypes.data - mem.ptr)

    @property
    def device(self) -> Any:
        from cupy.cuda import Device

        return Device()

    @property
    def __cuda_array_interface__(self) -> dict:
        shown = dict(self.host.__array_interface__)
        where = self.host.ctypes.data if self.size else 0
        return shown | {"data": (where, False), "version": 3, "stream": None}

    def __len__(self) -> int:
        return len(self.host)

    def __repr__(self) -> str:
        return f"emulated {self.get()!r}"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any):
        if method != "__call__":
            return NotImplemented
        return wrapped(ufunc)(*inputs, **options)

    def __array_function__(self, called: Any, types: Any, args: tuple, options: dict):
        import cupy

        own = getattr(cupy, called.__name__, None)
        return NotImplemented if own is None else own(*args, **options)

    # --- views ------------------------------------------------------------------------

    def _view(self, host: np.ndarray) -> "ndarray":
        """An array on the same memory."""
        view = object.__new__(ndarray)
        view._memory, view.host = self._memory, host
        view.base = self if self.base is None else self.base
        return view

    def _of(self, make: Callable[[], np.ndarray]) -> "ndarray":
        """A view where NumPy gives one, else an array in device memory."""
        host = np.asarray(_quietly(make))
        shares = np.may_share_memory(host, self.host) and host.size
        if shares:
            return self._view(host)
        streams.run_current()
        return _made(make)

    def reshape(self, *shape: Any, order: str = "C") -> "ndarray":
        streams.run_current()
        own = self.host
        return self._of(lambda: own.reshape(*shape, order=order))

    def view(self, dtype: Any = None) -> "ndarray":
        return self._view(self.host.view(dtype))

    def transpose(self, *axes: Any) -> "ndarray":
        return self._view(self.host.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> "ndarray":
        return self._view(self.host.swapaxes(a, b))

    def squeeze(self, axis: Any = None) -> "ndarray":
        return self._view(self.host.squeeze(axis))

    def ravel(self, order: str = "C") -> "ndarray":
        streams.run_current()
        own = self.host
        return self._of(lambda: own.ravel(order))

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> "ndarray":
        key, own = _index(key), self.host
        return self._of(lambda: own[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("a NumPy array cannot be written into an array on a device")
        key, own = _index(key), self.host
        given = value.host if isinstance(value, ndarray) else value
        streams.do(lambda: operator.setitem(own, key, given))

    # --- copies -----------------------------------------------------------------------

    def get(
        self,
        stream: Any = None,
        order: str = "C",
        out: np.ndarray | None = None,
        blocking: bool = True,
    ) -> np.ndarray:
        out = np.empty(self.shape, self.dtype, order=order) if out is None else out
        if out.shape != self.shape or out.dtype != self.dtype:
            raise ValueError(f"out is {out.shape} {out.dtype}, not like the array")
        on = streams.of(stream)
        on.submit(functools.partial(np.copyto, out, self.host))
        if blocking or not memory.is_pinned(out):
            on.synchronize()
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if arr.shape != self.shape or arr.dtype != self.dtype:
            raise ValueError(
                f"{arr.shape} {arr.dtype} set in {self.shape} {self.dtype}"
            )
        on = streams.of(stream)
        # Pinned memory is read when the copy is done, other memory at once
        kept = arr if memory.is_pinned(arr) else arr.copy()
        on.submit(lambda: np.copyto(self.host, kept))

    def copy(self, order: str = "C") -> "ndarray":
        streams.run_current()
        own = self.host
        return _made(lambda: own.copy(order))

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> "ndarray":
        if not copy and self.dtype == dtype:
            return self
        streams.run_current()
        own = self.host
        return _made(lambda: own.astype(dtype))

    def fill(self, value: Any) -> None:
        own = self.host
        streams.do(lambda: own.fill(value))

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    __index__ = __int__


def _index(key: Any) -> Any:
    """A key for NumPy: arrays on the device read, which waits for masks alone."""
    if isinstance(key, tuple):
        return tuple(_index(part) for part in key)
    if not isinstance(key, ndarray):
        return key
    if key.dtype == bool:
        streams.current().synchronize()
    else:
        streams.run_current()
    return key.host


def _made(make: Callable[[], Any], host: Any = None) -> ndarray:
    """An array in new device memory with what `make` gives, again in each launch of a
    graph; `host` is what it gives now."""
    host = np.asarray(_quietly(make) if host is None else host)
    made = ndarray(host.shape, host.dtype)
    place = made.host

    def write() -> None:
        place[...] = make()

    if streams.current().recording is not None:
        streams.do(write)
    else:
        streams.run_current()
        place[...] = host
    return made


def _inner(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_inner(part) for part in x)
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return x.host if isinstance(x, ndarray) else x


def wrapped(function: Callable) -> Callable:
    """NumPy's function, on arrays of this package alone."""

    @functools.wraps(function)
    def call(*inputs: Any, out: ndarray | None = None, **options: Any) -> Any:
        if function.__name__ in _SEEN_BY_HOST:
            streams.current().synchronize()
        else:
            streams.run_current()
        inner = _inner(inputs)
        options = {k: _inner(v) for k, v in options.items()}
        if out is not None:
            options["out"] = out.host
        if out is not None or function.__name__ in _INTO_FIRST:
            streams.do(lambda: function(*inner, **options))
            return out
        result = _quietly(lambda: function(*inner, **options))
        if isinstance(result, tuple | list):
            return type(result)(
                _result(lambda i=i: function(*inner, **options)[i], x, inputs)
                for i, x in enumerate(result)
            )
        return _result(lambda: function(*inner, **options), result, inputs)

    return call


def _quietly(work: Callable[[], Any]) -> Any:
    """What is captured is done on numbers that may be anything."""
    if streams.current().recording is None:
        return work()
    with np.errstate(all="ignore"):
        return work()


def _result(make: Callable[[], Any], host: Any, inputs: tuple) -> ndarray:
    """A view of an input where NumPy made one, else a new array."""
    host = np.asarray(host)
    for x in inputs:
        if isinstance(x, ndarray) and host.size and np.may_share_memory(x.host, host):
            return x._view(host)
    return _made(make, host)


def asarray(a: Any, dtype: Any = None, order: Any = None, **_: Any) -> ndarray:
    """An array on the device; `a` itself where it is one of that type."""
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    # Copied by an event's leave
    streams.refuse_capture(streams.current())
    return _made(lambda: np.asarray(a, dtype))


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """An array of what the memory holds."""
    return ndarray(shape, dtype)


def asnumpy(
    a: Any,
    stream: Any = None,
    order: str = "C",
    out: np.ndarray | None = None,
    *,
    blocking: bool = True,
) -> np.ndarray:
    """The array in host memory."""
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    return np.asarray(a, order=order)


def _add_methods() -> None:
    """Operators and reductions of NumPy, for this package's arrays."""
    words = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
    for word in words.split():
        name = word if hasattr(operator, word) else f"{word}_"
        plain = getattr(operator, name)
        call = wrapped(plain)
        setattr(ndarray, f"__{word}__", lambda a, b, call=call: call(a, b))
        setattr(ndarray, f"__r{word}__", lambda a, b, call=call: call(b, a))
        if word == "matmul":
            continue
        setattr(ndarray, f"__i{word}__", _in_place(getattr(operator, f"i{word}")))
    for word in "lt le eq ne gt ge".split():
        call = wrapped(getattr(operator, word))
        setattr(ndarray, f"__{word}__", lambda a, b, call=call: call(a, b))
    for word in "neg abs invert pos".split():
        call = wrapped(getattr(operator, word))
        setattr(ndarray, f"__{word}__", lambda a, call=call: call(a))
    words = "sum max min mean prod argsort argmax argmin cumsum any all dot clip take"
    for word in [*words.split(), "repeat", "nonzero", "sort", "std", "var"]:
        setattr(ndarray, word, _method(getattr(np.ndarray, word)))


def _in_place(plain: Callable) -> Callable:
    def call(self: ndarray, other: Any) -> ndarray:
        own, given = self.host, _inner(other)
        streams.do(lambda: plain(own, given))
        return self

    return call


def _method(plain: Callable) -> Callable:
    call = wrapped(plain)
    return lambda self, *rest, **options: call(self, *rest, **options)


_add_methods()
ndarray.__hash__ = None
