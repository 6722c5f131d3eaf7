"""What the system says of a process of this host, for ranks that do not answer."""

import os
import socket
from pathlib import Path
from typing import NamedTuple

_STATES = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "D": "waits inside the system, as for a disk",
    "Z": "has died",
    "X": "has died",
}


class Process(NamedTuple):
    """A process.

    started  tells it from a later one of the same number
    realm    where numbers of processes mean the same: one kernel, one container
    """

    host: str
    pid: int
    started: str
    realm: str


def own_process() -> Process:
    """This process; ``realm`` is empty where the system does not tell."""
    pid = os.getpid()
    fields, realm = _fields(pid), ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        realm = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        fields = None
    return Process(socket.gethostname(), pid, fields[1] if fields else "", realm)


def describe(process: Process, own: Process) -> str:
    """Number and host of a process, and what keeps it from answering if that is seen
    from ``own``."""
    text = f"process {process.pid} on host {process.host}"
    if process.realm != own.realm or not process.started:
        return text
    return f"{text} {_state(process)}".rstrip()


def _state(process: Process) -> str:
    fields = _fields(process.pid)
    if fields is None or fields[1] != process.started:
        return "has died"
    return _STATES.get(fields[0], "")


def _fields(pid: int) -> tuple[str, str] | None:
    """State and start of a process, as in proc(5); None where there is none."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may hold anything
    words = stat.rpartition(")")[2].split()
    return words[0], words[19]
