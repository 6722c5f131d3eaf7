"""The command line: one file per command, each parses, calls one function, prints."""

from mpipar.cli.entry import main

__all__ = ["main"]
