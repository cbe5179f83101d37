"""What the user sees between the command and the first request: a bar, then how to connect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from surestep_common.errors import Unavailable

from .child import tail
from .http import call

_POLL_S = 0.1
_LOADED = re.compile(rb"loading weights: (\d+) of (\d+) MB")  # written by the rank
_DIED = re.compile(rb"rank \d+ ended: (.*)")  # written by the supervisor
_MAX_DEATHS = 2  # of one rank before the model is up: it will not get better


class Startup:
    """Watches the services come up. `name` is the model's; logs are those of the workers.

    `certificate` is what a gateway that speaks HTTPS shows.
    """

    def __init__(
        self,
        url: str,
        name: str,
        worker_logs: Sequence[Path],
        console: Console,
        *,
        certificate: Path | None = None,
    ) -> None:
        self._url = url
        self._name = name
        self._logs = {path: _size(path) for path in worker_logs}  # what earlier runs wrote
        self._console = console
        self._certificate = certificate

    async def wait(self, stop: asyncio.Event) -> bool:
        """Wait until the gateway says ready. False when `stop` is set first. Raises Unavailable."""
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        began = time.monotonic()
        with bar:
            task = bar.add_task(f"Starting {self._name}", total=None)
            while not await asyncio.to_thread(self._ready):
                loaded = self._check_workers()
                if loaded is not None:
                    bar.update(task, description=f"Loading {self._name}", total=1, completed=loaded)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _POLL_S)
                if stop.is_set():
                    return False
        self.say(f"Ready after {time.monotonic() - began:.1f} s")
        return True

    def say(self, line: str) -> None:
        """Tell the user something in passing."""
        self._console.print(line, markup=False)

    def announce(self, *, needs_key: bool) -> None:
        """Print the URL, a command to try and where the logs are; never a key."""
        body = {"model": self._name, "messages": [{"role": "user", "content": "Say hello."}]}
        flags = "-H 'Content-Type: application/json'"
        flags += ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
        out = Console(highlight=False, soft_wrap=True)
        for line in (
            f"Serving {self._name} at {self._url}/v1",
            f"Try:  curl {self._url}/v1/chat/completions {flags} -d '{json.dumps(body)}'",
            f"Logs: {next(iter(self._logs)).parent}",
            "Stop: Ctrl-C",
        ):
            out.print(line, markup=False)

    def _ready(self) -> bool:
        try:
            ready = call(f"{self._url}/health/ready", certificate=self._certificate)
        except OSError:
            return False
        return ready.status == 200

    def _check_workers(self) -> float | None:
        """Part of the weights that the slowest rank has loaded, if any. Raises Unavailable."""
        parts = []
        for path, skip in self._logs.items():
            text = path.read_bytes()[skip:] if path.exists() else b""
            deaths = _DIED.findall(text)
            if len(deaths) >= _MAX_DEATHS:
                reason = deaths[-1].decode(errors="replace")
                raise Unavailable(f"the worker cannot start: {reason}\n{tail(path)}")
            parts += [int(done) / int(total) for done, total in _LOADED.findall(text)[-1:]]
        return min(parts, default=None)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
