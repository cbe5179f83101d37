"""Addresses for servers of a test, on the loopback interface."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_address() -> str:
    """host:port that was free a moment ago."""
    return f"127.0.0.1:{free_port()}"
