"""Network interfaces of this host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from surestep_common import addresses

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFREQ = struct.Struct("16s24x")
_ADDRESS = slice(20, 24)  # of an IPv4 address in a struct ifreq
_IPV6 = Path("/proc/net/if_inet6")


def interface_towards(address: str) -> str | None:
    """Return the interface by which packets leave for host:port; None where there is no way.

    gloo listens where this host's own name leads, which is loopback on many hosts: ranks on other
    hosts then look for this one on theirs.
    """
    try:
        own = _own_address(*addresses.split(address))
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if own in _addresses(name)), None)


def _own_address(host: str, port: int) -> str:
    """Return the address that a peer would see. Sends nothing. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, peer = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)
        own: str = probe.getsockname()[0]
        return own


def _addresses(interface: str) -> set[str]:
    """Return the first IPv4 address of an interface, and all its IPv6 addresses."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            entry = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(interface.encode()))
        except OSError:  # it has none
            pass
        else:
            found.add(socket.inet_ntoa(entry[_ADDRESS]))
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else ():
        digits, *_, name = line.split()
        if name == interface:
            found.add(str(ipaddress.IPv6Address(int(digits, 16))))
    return found
