"""Free ports on the loopback interface for the services of one machine."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Mapping

from surestep_common.errors import Unavailable

_LOOPBACK = "127.0.0.1"
_RANGE = range(20_000, 32_000)  # below the ports that Linux hands out to outgoing connections
_ATTEMPTS = 100


def free_addresses(widths: Mapping[str, int]) -> dict[str, str]:
    """For each name a `host:port` from which on so many ports are free. Raises Unavailable."""
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
