"""What lies between the host and a device: streams, copies, memory. A CPU has none."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from mpipar.errors import DeviceError

Array = Any
Event = Any


class DeviceOps:
    """The words of `Ops` for a device that works beside the host; here there is none.

    Work that is given to a device is done later, in the order of its stream. There is
    a main one, and one beside it. An array that the side stream uses is kept until
    somebody has waited for that: else its memory is used again too early.
    """

    xp: ModuleType
    to_host: Callable[[Array], np.ndarray]

    @property
    def on_host(self) -> bool:
        """True where arrays lie in the memory that MPI reads directly."""
        return self.xp is np

    def asarray(self, x: Array) -> Array:
        """`x` on this device, its own type kept; the host does not wait."""
        return self.xp.asarray(x)

    def synchronize(self) -> None:
        """Wait until the device has done all work given to it (nothing on a CPU)."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Work given in here is done beside later work of the main stream, after all
        that it has been given so far."""
        return nullcontext()

    def record(self) -> Event:
        """The moment when all work given so far to the current stream is done."""
        return None

    def wait(self, event: Event) -> None:
        """Later work of the current stream begins after the event; the host goes on."""

    def finish(self, event: Event) -> None:
        """The host waits for the event; from any thread."""

    def host_bytes(self, size: int) -> np.ndarray:
        """(size,) bytes that the device copies to and from by itself."""
        return np.empty(size, np.uint8)

    def copy_to_host(self, x: Array, out: np.ndarray) -> None:
        """out = x, once the current stream gets there; x contiguous, out of
        `host_bytes` and of the type of x."""
        out[...] = x

    def recorded(self) -> AbstractContextManager[Any]:
        """Work given in here is only noted; what it gives (`Recording`) does all of it
        again with each `launch`.

        Its arrays keep their places. The host may not wait in here, nor give numbers
        that change; arrays that the work reads must stay.   Raises DeviceError on a CPU
        """
        raise DeviceError("work of a CPU cannot be recorded")

    def account(self, held: Callable[[], Mapping[str, int]]) -> None:
        """Tells what the device's memory is held for, by kind, in bytes.

        held   a method, asked when there is too little; its object may go
        """

    def device_memory(self) -> dict[str, int]:
        """Bytes of the device, under the names of metrics; nothing on a CPU.

        device_peak       most that arrays took since it was asked last
        device_reserved   got from the driver, arrays and what is free between them
        device_workspace  what products work in, beside the arrays
        device_context    taken by the driver, libraries and other processes
        """
        return {}
