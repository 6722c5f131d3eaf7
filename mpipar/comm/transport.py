"""What MPI is shown of an array in host memory.

It is a C-contiguous NumPy array that holds the values of the logical array, whatever
its strides: a transposed array goes out in the order in which NumPy prints it, not in
the order in which it lies in memory.
"""

from typing import Any

import numpy as np

from mpipar.errors import DeviceError

Array = Any  # numpy.ndarray or cupy.ndarray


def solid(x: Array) -> np.ndarray:
    """``x`` where it is C-contiguous, else a copy. Raises DeviceError for all but
    numpy.ndarray."""
    if not isinstance(x, np.ndarray):
        raise DeviceError(
            f"messages from host memory need a numpy.ndarray, not "
            f"{type(x).__module__}.{type(x).__name__}"
        )
    return x if x.flags.c_contiguous else x.copy(order="C")
