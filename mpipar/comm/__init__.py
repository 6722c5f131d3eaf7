"""Collectives on arrays, layouts, transports, counters and the watchdog."""

from mpipar.comm.agree import raise_together
from mpipar.comm.communicator import Communicator
from mpipar.comm.counters import Counters, shares
from mpipar.comm.filework import awaited, file_work, moved
from mpipar.comm.handle import Handle
from mpipar.comm.layout import P, R, S, adjoint, reshard, volume
from mpipar.comm.null import NullCommunicator

__all__ = [
    "Communicator", "Counters", "Handle", "NullCommunicator", "P", "R", "S", "adjoint",
    "awaited", "file_work", "moved", "raise_together", "reshard", "shares", "volume",
]  # fmt: skip
