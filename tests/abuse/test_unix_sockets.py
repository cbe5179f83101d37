"""The sockets of `surestep serve`: strangers, what a killed server left, and two at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import httpx
import psutil
import pytest
from support.processes.stack import Stack, environment, serve
from surestep_common import addresses
from surestep_common.errors import Unavailable
from surestep_common.notify import Listener
from surestep_gateway.http.listener import bind_path

pytestmark = [pytest.mark.timeout(120), pytest.mark.rotates(2, turn=1)]
_FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", "0.01")
_NOBODY = 65534
_CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
_SEND = """
import socket, sys
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"WATCHDOG=1", "\\0" + sys.argv[1])
"""
as_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root becomes another user"
)


def stranger(code: str, argument: str) -> subprocess.CompletedProcess[str]:
    """Run this in Python as another user of the machine."""
    user = f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"
    command = ["setpriv", *user, "python3", "-c", code, argument]
    path = {"PATH": "/usr/bin:/bin"}  # the Python of the machine, which every user can read
    return subprocess.run(command, env=path, capture_output=True, text=True, check=False)


@as_root
def test_other_users_do_not_connect(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, tmp_path, *_FLAGS) as stack:
        scheduler = stack.scheduler()
        supervisor = scheduler["supervisors"][0]
        for address in (scheduler["address"], supervisor["address"], supervisor["rank_address"]):
            path = addresses.socket_path(address)
            assert path is not None
            assert "PermissionError" in stranger(_CONNECT, path).stderr


@as_root
def test_signs_of_life_of_other_users_are_none() -> None:
    listener = Listener()
    assert stranger(_SEND, listener.address.removeprefix("@")).returncode == 0
    assert not listener.heard()
    here = [sys.executable, "-c", _SEND, listener.address.removeprefix("@")]
    subprocess.run(here, check=True)
    assert listener.heard()
    listener.close()


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name a socket for each service, in a folder with a short name."""
    folder = tmp_path_factory.mktemp("s")
    names = "scheduler", "supervisor", "worker"
    return [part for n in names for part in (f"--{n}-listen", f"unix:{folder / n}")]


class Killed(Exception):
    """The server has been killed, and need not end well."""


def test_sockets_that_are_left_are_used_again(
    tiny_model: Path, tmp_path: Path, sockets: list[str]
) -> None:
    """By a server of which every process was killed at once; a second beside it is refused."""
    uds = tmp_path / "api"
    with pytest.raises(Killed):
        _serve_until_killed(tiny_model, tmp_path, uds, sockets)
    assert uds.is_socket()
    with serve(tiny_model, tmp_path / "next", *_FLAGS, *sockets, uds=uds) as stack:
        assert answers(stack)


def _serve_until_killed(model: Path, folder: Path, uds: Path, sockets: list[str]) -> None:
    second = [sys.executable, "-m", "surestep_cli", "serve", str(model), *_FLAGS, *sockets]
    second += ["--port", "0", "--log-dir", str(folder / "second")]
    with serve(model, folder / "first", *_FLAGS, *sockets, uds=uds) as stack:
        refused = subprocess.run(
            second, env=environment({}), capture_output=True, text=True, timeout=60, check=False
        )
        assert refused.returncode == 1, refused.stderr
        assert "another process does" in refused.stderr
        assert answers(stack), "the second has taken nothing away"
        launcher = psutil.Process(stack.process.pid)
        everyone = [launcher, *launcher.children(recursive=True)]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):  # it goes with the launcher
                process.kill()
        stack.process.wait()
        psutil.wait_procs(everyone, timeout=30)
        raise Killed


def answers(stack: Stack) -> bool:
    """Whether the server behind its socket generates."""
    transport = httpx.HTTPTransport(uds=unquote(stack.url.removeprefix("unix://")))
    with httpx.Client(transport=transport, base_url="http://any", timeout=30) as client:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1}
        return client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("left", [False, True])
def test_of_those_that_start_at_once_one_has_the_socket(tmp_path: Path, left: bool) -> None:
    path, count = tmp_path / "api", 8
    together = threading.Barrier(count)
    if left:
        bind_path(path).close()

    def start(_: int) -> socket.socket | Unavailable:
        together.wait()
        try:
            return bind_path(path)
        except Unavailable as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(start, range(count)))
    refused = [outcome for outcome in outcomes if isinstance(outcome, Unavailable)]
    for outcome in outcomes:
        if isinstance(outcome, socket.socket):
            outcome.close()
    assert len(refused) == count - 1
    assert {str(error).partition(": ")[2] for error in refused} <= {
        "another process does",
        "another process begins to",
    }
