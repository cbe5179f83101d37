"""Addresses of gRPC services: `host:port`, or `unix:/path` of a socket on this machine."""

from __future__ import annotations

import re

UNIX = "unix:"
LONGEST_PATH = 100  # bytes of a socket's path, which Linux allows 107 of; "-RANK" may follow
PATTERN = r"^(?:[^\s:]+:\d{1,5}|unix:/\S+)$"


def check(address: str) -> str:
    """Return an address as gRPC is to have it, without `grpc://`. Raise ValueError."""
    bare = address.removeprefix("grpc://").rstrip("/")
    host, _, port = bare.rpartition(":")
    if bare.startswith(UNIX + "/") or (host and "/" not in host and port.isdecimal()):
        return bare
    raise ValueError("must be host:port, with or without grpc:// in front, or unix:/path")


def nth(address: str, rank: int) -> str:
    """Return the address of a rank, given that of rank 0: the port, or name, that many on."""
    if address.startswith(UNIX):
        return f"{address}-{rank}" if rank else address
    host, port = split(address)
    return f"{host}:{port + rank}"


def split(address: str) -> tuple[str, int]:
    """Return host and port; a socket's path, and 0."""
    if address.startswith(UNIX):
        return address.removeprefix(UNIX), 0
    host, _, port = address.rpartition(":")
    return host, int(port)


def bound(address: str, port: int) -> str:
    """Return the address of a server that was to listen there and got this port."""
    return address if address.startswith(UNIX) else re.sub(r":\d+$", f":{port}", address)


def is_fit(path: str) -> bool:
    """Return whether a socket can have this path."""
    return path.startswith("/") and len(path.encode()) <= LONGEST_PATH
