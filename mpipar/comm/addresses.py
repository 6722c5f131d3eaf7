"""The IPv4 addresses under which other hosts may reach this one."""

import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: address of a network interface


def own_addresses() -> list[str]:
    """Return every address of this host but loopback ones; loopback if there is none.

    The host's name alone does not do: it often resolves to 127.0.1.1, or not at all.
    """
    found = dict.fromkeys([*_by_interface(), *_by_name()])
    return [a for a in found if not a.startswith("127.")] or ["127.0.0.1"]


def _by_interface() -> list[str]:
    try:
        from fcntl import ioctl
    except ImportError:
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # no IPv4 address, or not Linux
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _by_name() -> list[str]:
    try:
        return socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        return []
