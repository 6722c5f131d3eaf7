"""Two hosts on one machine: network namespaces, joined by a bridge of 1 Gbit/s.

Each has a name and processes of its own, and MPI between them goes through the network,
which counts its bytes. Ranks of one host share memory as ever.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher import mpiexec

# Stands for ssh: [options] ADDRESS COMMAND, in the namespace that has the address
_SHELL = """#!/bin/bash
PATH=$PATH:/usr/sbin:/sbin
while [[ $1 == -* ]]; do shift; done
name={prefix}${{1##*.}}; shift
unshare="unshare --uts --ipc --pid --fork --kill-child --mount-proc"
exec ip netns exec "$name" $unshare bash -c "hostname $name; exec $*"
"""
_NET = "10.77.{net}."
# Where the tools of root are, which not every PATH has
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_RATE = "1gbit"


@dataclass(frozen=True)
class Hosts:
    """Two hosts that are up.

    names      of the hosts;  launcher  words that start ranks on both, half on each
    env        variables that keep MPI on the network
    """

    names: list[str]
    launcher: list[str]
    env: dict[str, str]

    def sent(self) -> list[int]:
        """Bytes that each host has sent so far, with all headers."""
        found = []
        for name in self.names:
            text = _run("ip", "netns", "exec", name, "tc", "-s", "qdisc", "show",
                        "dev", "eth0")  # fmt: skip
            found.append(int(re.search(r"Sent (\d+) bytes", text)[1]))
        return found


def obstacle() -> str | None:
    """Why two hosts cannot be made here; None where they can."""
    tools = ("ip", "tc", "unshare", "bash")
    if reason := lacking("two hosts", tools):
        return reason
    name = f"mpx{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as problem:
        return f"no network namespaces here: {problem.stderr.strip()}"
    return None


def lacking(what: str, tools: Sequence[str]) -> str | None:
    """What `what` lacks here: root, tools, or MPICH."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return f"{what} need root"
    missing = [tool for tool in tools if shutil.which(tool, path=PATH) is None]
    if missing:
        names = ", ".join(missing)
        return f"{what} need {names} (Debian: bash tests/cluster/packages.sh)"
    version = subprocess.run(
        [*mpiexec(), "--version"], capture_output=True, text=True, check=False
    )
    return None if "HYDRA" in version.stdout else f"{what} are tried with MPICH"


@contextmanager
def two_hosts(folder: Path, ranks: int) -> Iterator[Hosts]:
    """Makes two hosts for `ranks` ranks each, and takes them down again.

    Raises   CalledProcessError where the system does not let it
    """
    number = os.getpid()
    prefix, bridge = f"mph{number}x", f"mpb{number}"
    net = _NET.format(net=number % 250)
    names = [f"{prefix}{end}" for end in (11, 12)]
    shell = folder / "shell"
    shell.write_text(_SHELL.format(prefix=prefix))
    shell.chmod(0o755)
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{net}1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for place, name in enumerate(names):
            _add_host(name, f"mpv{number}{place}", bridge, f"{net}{11 + place}/24")
        spread = ",".join(f"{net}{end}:{ranks}" for end in (11, 12))
        words = ["-localhost", f"{net}1", "-launcher", "ssh"]
        words += ["-launcher-exec", str(shell), "-hosts", spread]
        # Without these MPI finds the memory that the hosts really share.
        env = {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "eth0"}
        yield Hosts(names, [*mpiexec(), *words], env)
    finally:
        ends = [["netns", "del", name] for name in names]
        for words in (*ends, ["link", "del", bridge]):
            with suppress(subprocess.CalledProcessError):
                _run("ip", *words)


def _add_host(name: str, cable: str, bridge: str, address: str) -> None:
    """A namespace with one end of a cable, whose other end is in the bridge."""
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", cable, "type", "veth",
         "peer", "name", "eth0", "netns", name)  # fmt: skip
    _run("ip", "link", "set", cable, "master", bridge)
    _run("ip", "link", "set", cable, "up")
    inside = ("ip", "netns", "exec", name)
    _run(*inside, "ip", "addr", "add", address, "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
         "rate", _RATE, "burst", "256k", "latency", "50ms")  # fmt: skip


def _run(*words: str) -> str:
    env = os.environ | {"PATH": PATH}
    options = {"check": True, "capture_output": True, "text": True, "env": env}
    return subprocess.run(words, **options).stdout
