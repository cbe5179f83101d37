"""`surestep serve` as a user starts it: real processes, real ports, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from support.processes.ports import free_port
from surestep_cli.api.http import call

START_S = 90.0
STOP_S = 30.0


class Stack:
    """A running server. `url` is the gateway's root."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, logs: Path) -> None:
        self.process = process
        self.url = url
        self.logs = logs

    def get(self, path: str) -> Any:
        """JSON of a GET."""
        reply = httpx.get(self.url + path, timeout=10)
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
        with contextlib.suppress(OSError):
            return call(f"{self.url}/health/ready").status == 200
        return False

    def tail(self) -> str:
        """The ends of all logs, for messages of failed tests."""
        parts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(self.logs.rglob("*.log"))
        ]
        return "\n".join(parts)


@contextlib.contextmanager
def serve(
    model: Path,
    logs: Path,
    *flags: str,
    variables: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    console: Path | None = None,
    uds: Path | None = None,
) -> Iterator[Stack]:
    """Start, wait until ready, yield, stop with SIGINT, and insist on a clean exit.

    `variables` join the environment; a PYTHONPATH among them comes before ours. `within` is a
    command that becomes the one behind it. `console` is where the launcher's output goes, if not
    to the logs. `uds` is a socket to listen on, in place of a port.
    """
    port = free_port()
    logs.mkdir(parents=True, exist_ok=True)
    command = [*within, sys.executable, "-m", "surestep_cli", "serve", str(model)]
    command += ["--port", str(port)] if uds is None else ["--uds", str(uds)]
    with (console or logs / "console.log").open("wb") as console_file:
        process = subprocess.Popen(
            [*command, "--log-dir", str(logs), *flags],
            stdout=console_file,
            stderr=subprocess.STDOUT,
            env=environment(variables or {}),
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}" if uds is None else f"unix://{quote(str(uds), safe='')}"
    stack = Stack(process, url, logs)
    try:
        stack.wait_until(stack.is_ready, "readiness")
        yield stack
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0, stack.tail()
    finally:
        _kill_session(process)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a process under test: no settings of the developer's shell, and the modules we have."""
    inherited = {key: value for key, value in os.environ.items() if "SURESTEP_" not in key}
    paths = [variables.get("PYTHONPATH", ""), *sys.path]
    inherited["SURESTEP_DEVICE"] = "cpu"  # with GPUs too: who wants one says so
    return {**inherited, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
