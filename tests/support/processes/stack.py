"""`surestep serve` as a user starts it: real processes, real ports, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from surestep_cli.serve.serving import Server, is_ready, serving
from surestep_common.errors import Unavailable

START_S = 90.0
STOP_S = 30.0


class Stack:
    """A running server. `url` is the gateway's root."""

    def __init__(self, server: Server, logs: Path) -> None:
        self._server = server
        self.process = server.process
        self.url = server.url
        self.logs = logs
        self.headers: dict[str, str] = {}  # of questions, for a server that asks for a key

    def get(self, path: str) -> Any:
        """JSON of a GET."""
        reply = httpx.get(self.url + path, headers=self.headers, timeout=10)
        reply.raise_for_status()
        return reply.json()

    def status(self) -> Any:
        """The /status document; "scheduler" is the status of the first one, or None."""
        document = self.get("/status")
        return document | {"scheduler": document["schedulers"][0]["status"]}

    def scheduler(self) -> Any:
        """The status of the first scheduler: /status has none while it is late, or being replaced."""
        told: list[Any] = []

        def tells() -> bool:
            told[:] = [self.status()["scheduler"]]
            return told[0] is not None

        self.wait_until(tells, "the status of the scheduler", 20)
        return told[0]

    def kill_rank(self, rank: int = 0) -> None:
        """Kill a worker's process, as the kernel might."""
        os.kill(self.scheduler()["ranks"][rank]["pid"], signal.SIGKILL)

    @contextlib.contextmanager
    def launcher_stopped(self) -> Iterator[None]:
        """Keep the launcher from replacing what ends within the context."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric."""
        text = httpx.get(self.url + "/metrics", timeout=10).text
        lines = [
            line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name
        ]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_until(self, condition: Any, what: str, timeout_s: float = START_S) -> None:
        """Poll until `condition()` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the server ended: {self.tail()}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.tail()}"
            time.sleep(0.05)

    def is_ready(self) -> bool:
        """Whether /health/ready says so."""
        return is_ready(self._server)

    def tail(self) -> str:
        """The ends of all logs."""
        return tail(self.logs)


def tail(logs: Path) -> str:
    """The ends of all logs, for messages of failed tests."""
    parts = [
        f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
        for path in sorted(logs.rglob("*.log"))
    ]
    return "\n".join(parts)


@contextlib.contextmanager
def serve(
    model: Path | None,
    logs: Path,
    *flags: str,
    variables: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    console: Path | None = None,
    uds: Path | None = None,
) -> Iterator[Stack]:
    """Start, wait until ready, yield, stop with SIGINT, and insist on a clean exit.

    Without a model the flags name some. `variables` join the environment; a PYTHONPATH among them comes before ours. `within` is a
    command that becomes the one behind it. `console` is where the launcher's output goes, if not
    to the logs. `uds` is a socket to listen on, in place of a port.
    """
    socket = {} if uds is None else {"uds": uds}
    starting = serving(
        model,
        flags,
        environ=environment(variables or {}),
        log=console or logs / "console.log",
        within=within,
        log_dir=logs,
        **socket,
    )
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as loop:  # a step of it at a time
        try:
            server = loop.run(asyncio.wait_for(starting.__aenter__(), START_S))
        except (Unavailable, TimeoutError) as error:
            raise AssertionError(f"no readiness: {tail(logs)}") from error
        try:
            yield Stack(server, logs)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(STOP_S) == 0, tail(logs)
        finally:
            loop.run(starting.__aexit__(None, None, None))


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process under test: no settings of the developer's shell, and the
    modules we have."""
    inherited = {key: value for key, value in os.environ.items() if "SURESTEP_" not in key}
    paths = [variables.get("PYTHONPATH", ""), *sys.path]
    inherited["SURESTEP_DEVICE"] = "cpu"  # with GPUs too: who wants one says so
    inherited["SURESTEP_SPECULATIVE_CONFIG"] = "none"  # answers take as long as the ones before
    return {**inherited, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def own_cache(folder: Path) -> Path:
    """Make `folder` a cache of its own, but for the compiled kernels, which take half a minute."""
    kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surestep/kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "surestep").mkdir(parents=True, exist_ok=True)
    (folder / "surestep" / "kernels").symlink_to(kernels)
    return folder
