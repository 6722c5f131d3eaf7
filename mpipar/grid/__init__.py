"""The rank grid: one communicator per axis."""

from mpipar.grid.grid import Grid
from mpipar.grid.serial import SerialGrid, serial_grid

__all__ = ["Grid", "SerialGrid", "serial_grid"]
