"""Products of the library that stands for cuBLASLt take their turn in the streams."""

import ctypes
import os

from cupy.cuda import streams

PATH = os.environ.get("MPIPAR_CUBLASLT")

if PATH:
    _library = ctypes.CDLL(PATH)
    _library.shim_work.argtypes = (ctypes.c_void_p,)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    def _submit(stream: int | None, work: int) -> None:
        queue = streams.queues[stream or 0]
        queue.submit(lambda: _library.shim_work(work))

    _library.shim_defer(_submit)
