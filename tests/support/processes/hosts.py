"""Two hosts on this machine: network namespaces with a wire between them that can be cut or lossy.

The test has a line to the first host only. Addresses are of 198.18.0.0/15, which is for trials of
networks and routed nowhere. nftables drops packets: not every kernel has netem.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

_TOOLS = ("ip", "nft")


class Host:
    """A network namespace and the processes in it."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._starter = ThreadPoolExecutor(1)  # processes end with the thread that started them

    def start(self, log: str, *command: str, environ: Mapping[str, str]) -> None:
        """Start a process, whose output is appended to a log."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"{log}.log").open("ab") as out:
            named = ("ip", "netns", "exec", self.name, *command)
            popen = partial(subprocess.Popen, named, text=True, env=environ, stdout=out, stderr=out)
            self._started.append(self._starter.submit(popen).result())

    def end(self) -> None:
        """Kill every process, as a host that loses its power."""
        while pids := _run("ip", "netns", "pids", self.name).split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(20)
        self._started.clear()


class TwoHosts(NamedTuple):
    """The hosts, the address of the first one for the test, and what happens between them."""

    first: Host
    second: Host
    front: str

    def drop(self, percent: int) -> None:
        """Lose so many packets of a hundred, either way and without a word."""
        chosen = "" if percent == 100 else f"numgen random mod 100 < {percent}"
        table = (
            "flush ruleset\ntable inet wire {\nchain input {\n"
            f'type filter hook input priority 0\niifname "wire" {chosen} drop\n}}\n}}\n'
        )
        for host in (self.first, self.second):
            _run("ip", "netns", "exec", host.name, "nft", "-f", "-", given=table)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make the hosts, or skip the test with the reason why they cannot be made."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {' and '.join(missing)}: packages iproute2 and nftables")
    mark = os.getpid() % (1 << 13)  # eight addresses of its own
    net, first = f"198.{18 + (mark >> 12)}.{mark >> 5 & 0xFF}", mark % 32 * 8
    outside, front, one, other = (f"{net}.{first + n}" for n in (1, 2, 5, 6))
    line, names = f"surestep-{mark}", [f"surestep-{mark}-{n}" for n in (0, 1)]
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(_host(*pair, folder))
            for pair in zip(names, (one, other), strict=True)
        ]
        _run(*f"ip link add wire netns {names[0]} type veth peer wire netns {names[1]}".split())
        _run(*f"ip link add {line} type veth peer front netns {names[0]}".split())
        stack.callback(_run, "ip", "link", "del", line)
        _up((), line, outside)
        for name, device, address in (
            (names[0], "front", front),
            (names[0], "wire", one),
            (names[1], "wire", other),
        ):
            _up(("-n", name), device, address)
        yield TwoHosts(hosts[0], hosts[1], front)


@contextlib.contextmanager
def _host(name: str, address: str, folder: Path) -> Iterator[Host]:
    host = Host(name, address, folder)
    try:
        _run("ip", "netns", "add", name)
    except AssertionError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield host
    finally:
        host.end()
        _run("ip", "netns", "del", name)


def _up(where: Sequence[str], device: str, address: str) -> None:
    _run("ip", *where, "addr", "add", f"{address}/30", "dev", device)
    _run("ip", *where, "link", "set", device, "up")


def _run(*command: str, given: str = "") -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout
