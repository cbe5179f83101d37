"""Free ports on the loopback interface for the services of one machine."""

from __future__ import annotations

import contextlib
import random
import socket

from surestep_common.errors import Unavailable

_LOOPBACK = "127.0.0.1"
_RANGE = range(20_000, 32_000)  # below the ports that Linux hands out to outgoing connections
_ATTEMPTS = 100


def free_address(width: int = 1) -> str:
    """`host:port` such that `width` ports from there on are free now. Raises Unavailable."""
    rng = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = rng.randrange(_RANGE.start, _RANGE.stop - width)
        if all(is_free(_LOOPBACK, port + i) for i in range(width)):
            return f"{_LOOPBACK}:{port}"
    raise Unavailable(f"found no {width} free ports in {_RANGE.start}-{_RANGE.stop}")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
