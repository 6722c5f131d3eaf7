"""How an array gets into memory that MPI can read, and back.

Both transports show MPI a C-contiguous NumPy array that holds the values of the logical
array, whatever its strides: a transposed array goes out in the order in which NumPy
prints it, not in the order in which it lies in memory.
"""

from typing import Any, Protocol

import numpy as np

from mpipar.errors import DeviceError

Array = Any  # numpy.ndarray or cupy.ndarray


class Transport(Protocol):
    """The two moves between an array and the memory that MPI works on."""

    def pull(self, x: Array) -> np.ndarray:
        """Return a C-contiguous host array with the values of ``x``."""

    def push(self, host: np.ndarray, x: Array) -> None:
        """Put the values of ``host``, which came from ``pull(x)``, back in ``x``."""

    def give(self, host: np.ndarray, like: Array) -> Array:
        """Return ``host`` as an array on the device of ``like``."""


class Host:
    """NumPy arrays as they are; copied only where they are not C-contiguous."""

    def pull(self, x: Array) -> np.ndarray:
        if not isinstance(x, np.ndarray):
            raise DeviceError(
                f"messages from host memory need a numpy.ndarray, not "
                f"{type(x).__module__}.{type(x).__name__}"
            )
        return x if x.flags.c_contiguous else x.copy(order="C")

    def push(self, host: np.ndarray, x: Array) -> None:
        if not x.flags.c_contiguous:
            x[...] = host.reshape(x.shape)

    def give(self, host: np.ndarray, like: Array) -> Array:
        return host


class Staged(Host):
    """CuPy arrays through a copy in host memory, ordered with the current stream.

    ``pull`` returns when the kernels that write ``x`` are done and its values are in
    host memory; ``push`` and ``give`` return when the values are on the device. NumPy
    arrays, such as a step's few scalars, go as they are.
    """

    def pull(self, x: Array) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return super().pull(x)
        import cupy

        if not isinstance(x, cupy.ndarray):
            raise DeviceError(
                f"messages need a numpy.ndarray or a cupy.ndarray, not "
                f"{type(x).__module__}.{type(x).__name__}"
            )
        host = cupy.asnumpy(x, order="C")
        cupy.cuda.get_current_stream().synchronize()
        return host

    def push(self, host: np.ndarray, x: Array) -> None:
        if isinstance(x, np.ndarray):
            super().push(host, x)
        else:
            x[...] = self.give(host.reshape(x.shape), x)

    def give(self, host: np.ndarray, like: Array) -> Array:
        if isinstance(like, np.ndarray):
            return host
        import cupy

        x = cupy.asarray(host)
        cupy.cuda.get_current_stream().synchronize()
        return x
