"""Free ports for the services of one machine, and checks of the API's address."""

from __future__ import annotations

import errno
import itertools
import random
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from surestep_common import addresses
from surestep_common.errors import Unavailable

_LOOPBACK = "127.0.0.1"
_RANGE = range(20_000, 32_000)  # below the ports that Linux hands out to outgoing connections
_ATTEMPTS = 100


def free_addresses(widths: Mapping[str, int]) -> dict[str, str]:
    """Return for each name a `host:port` followed by as many free ports as needed. Raise
    Unavailable.
    """
    total = sum(widths.values())
    rng = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        first = rng.randrange(_RANGE.start, _RANGE.stop - total)
        if all(is_free(_LOOPBACK, first + i) for i in range(total)):
            starts = itertools.accumulate(widths.values(), initial=first)
            return {
                name: f"{_LOOPBACK}:{start}" for name, start in zip(widths, starts, strict=False)
            }
    raise Unavailable(f"found no {total} free ports in {_RANGE.start}-{_RANGE.stop}")


def check_address(host: str, port: int) -> None:
    """Raise Unavailable unless a server could listen there; port 0 is any."""
    error = _refusal(host, port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise Unavailable(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    taken = f"port {port} of {host} is taken; --port takes another, 0 any"
    raise Unavailable(taken) from error


def check_socket(path: Path) -> None:
    """Raise Unavailable for a Unix socket that another server listens on."""
    if addresses.is_heard(str(path)):
        raise Unavailable(f"{path} is taken: a server listens on it; --uds takes another")


def check_services(listen: Iterable[str]) -> None:
    """Raise Unavailable if others listen where services are to: they would be taken for ours."""
    for address in listen:
        path = addresses.socket_path(address)
        heard = addresses.is_heard(path) if path is not None else _is_taken(address)
        if heard:
            raise Unavailable(f"cannot listen on {path or address}: another process does")


def _is_taken(address: str) -> bool:
    """Return whether a process listens on a port; a service reports other problems itself."""
    error = _refusal(*addresses.split(address))
    return error is not None and error.errno == errno.EADDRINUSE


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    return _refusal(host, port) is None


def _refusal(host: str, port: int) -> OSError | None:
    """Return why nothing can listen there now, None if something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
