"""Addresses of services: of gRPC, `host:port` or `unix:/path` of a socket here; of Redis."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator

from .errors import InvalidRequest, Unavailable

UNIX = "unix:"
_PROBE_TIMEOUT_S = 1.0
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


def socket_path(address: str) -> str | None:
    """Return the path of a socket; None for a host and its port."""
    return address.removeprefix(UNIX) if address.startswith(UNIX) else None


def bound(address: str, port: int) -> str:
    """Return the address of a server that was to listen there and got this port."""
    return address if address.startswith(UNIX) else re.sub(r":\d+$", f":{port}", address)


def is_fit(path: str) -> bool:
    """Return whether a socket can have this path."""
    return path.startswith("/") and len(path.encode()) <= LONGEST_PATH


@contextlib.contextmanager
def binding(path: str) -> Iterator[None]:
    """Bind a socket to this path inside the block, and listen. Raise Unavailable if others do.

    gRPC binds over the socket of a live server, and of two that start at once each would find the
    other's without a listener yet: so they take turns, by a lock on a file beside the socket.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        lock = os.open(f"{path}.lock", flags, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot listen on {path}: {error.strerror}") from error
    with os.fdopen(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unavailable(f"cannot listen on {path}: another process begins to") from error
        if is_heard(path):
            raise Unavailable(f"cannot listen on {path}: another process does")
        yield


def is_heard(path: str) -> bool:
    """Return whether anybody listens there, if too busy to accept."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


@contextlib.contextmanager
def redis_of(flag: str) -> Iterator[None]:
    """Import the client for Redis and hand it a URL within.

    Raises InvalidRequest that names the flag where the package is missing or refuses the URL.
    """
    param = flag.removeprefix("--").replace("-", "_")
    try:
        yield
    except ImportError:
        raise InvalidRequest(
            f"{flag}: the client for Redis is not installed; it comes with "
            "pip install 'surestep[redis]'",
            param=param,
        ) from None
    except (ValueError, TypeError):  # it may repeat a part of the password
        raise InvalidRequest(
            f"{flag}: expected redis://USER:PASSWORD@HOST:PORT/DATABASE, with %XX in place of "
            "other characters in a password than letters and digits",
            param=param,
        ) from None
