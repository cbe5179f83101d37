"""The start as the user sees it: a progress bar, then how to connect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.rpc import connect
from surestep_proto import supervisor_pb2 as pb
from surestep_proto.scheduler_pb2 import SchedulerInfoRequest
from surestep_proto.scheduler_pb2_grpc import SchedulerStub
from surestep_proto.supervisor_pb2_grpc import SupervisorStub

from surestep_cli.api.http import call, unix_socket
from surestep_cli.terminal.output import unbreakable

READY_PATH = "/health/ready?model=*"  # all models are
_POLL_S = 0.1
_STATUS_TIMEOUT_S = 1.0
_COMMAND = "surestep"
_EMBEDDER = "modules.json"  # in a model's folder: it was made for sentence-transformers
_LOADED = re.compile(rb"loading weights: (\d+) of (\d+) MB")  # written by the rank
_WARNING = re.compile(rb' WARNING |"level": "WARNING"')
_MAX_WARNINGS = 5  # shown of each rank
_MAX_DEATHS = 2  # of one rank before the model is up: it will not get better


class Worker(NamedTuple):
    """A supervisor and the log that it shares with its rank."""

    address: str
    log: Path


class Starting(NamedTuple):
    """A model that is started: its name, its ranks, and the address of a scheduler that serves it.

    `must_write`: refuse one that only makes embeddings.
    """

    name: str
    workers: Sequence[Worker]
    scheduler: str
    must_write: bool = False


class Startup:
    """Watches the services of models start.

    `certificate` is the one that a gateway with HTTPS presents. `has_page`: there is a status page.
    """

    def __init__(
        self,
        url: str,
        models: Sequence[Starting],
        console: Console,
        *,
        certificate: Path | None = None,
        has_page: bool = True,
    ) -> None:
        self._url = url
        self._models = models
        self._name = ", ".join(model.name for model in models)
        self._workers = [worker for model in models for worker in model.workers]
        self._skip = {worker.log: _size(worker.log) for worker in self._workers}  # of earlier runs
        self._console = console
        self._certificate = certificate
        self._has_page = has_page
        self._embeds = False  # what people ask of the first is embeddings
        self._drafts: list[str] = []  # how each does, and how many at most
        self.missing = "no answer yet"  # the reason, as the gateway reports it

    async def wait(self, stop: asyncio.Event) -> bool:
        """Wait until the gateway is ready. Return False when `stop` is set first.

        Raise Unavailable, and InvalidRequest for settings or a model that have to change.
        """
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            channels = [connect(worker.address) for worker in self._workers]
            for channel in channels:
                stack.push_async_callback(channel.close, None)
            stubs = [SupervisorStub(channel) for channel in channels]
            stack.enter_context(bar)
            task = bar.add_task(f"Starting {self._name}", total=None)
            while not await asyncio.to_thread(self._ready):
                await self._check_workers(stubs)
                if (loaded := self._loaded()) is not None:
                    bar.update(task, description=f"Loading {self._name}", total=1, completed=loaded)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _POLL_S)
                if stop.is_set():
                    return False
        for model in reversed(self._models):
            await self._ask_about(model)
        for line in self._warnings():
            self.say(line)
        self.say(f"Ready after {time.monotonic() - began:.1f} s")
        return True

    def say(self, line: str) -> None:
        """Print a line beside the progress bar."""
        self._console.print(line, markup=False, soft_wrap=True)

    def announce(self, *, needs_key: bool) -> None:
        """Print the URL, how it drafts, a command to try and where the logs are; never a key."""
        body: dict[str, Any] = {"model": self._models[0].name}
        if self._embeds:
            path, body["input"] = "embeddings", "Say hello."
        else:
            path = "chat/completions"
            body["messages"] = [{"role": "user", "content": "Say hello."}]
        data = shlex.quote(json.dumps(body))
        flags = "-H 'Content-Type: application/json'"
        flags += ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
        root, socket = self._url, unix_socket(self._url)
        if socket is not None:
            root, flags = "http://localhost", f"--unix-socket {shlex.quote(socket)} {flags}"
        out = Console(file=unbreakable(sys.stdout), highlight=False, soft_wrap=True)
        page = (f"Look: {self._url}/ui",) if self._has_page and socket is None else ()
        key = ' --api-key "$API_KEY"' if needs_key else ""
        named = f" --model {shlex.quote(self._models[0].name)}" if len(self._models) > 1 else ""
        talk = f"{_this_command()} chat --url {self._url}{named}{key}"
        chat = () if self._embeds else (f"Chat: {talk}",)
        for line in (
            f"Serving {self._name} at {self._url}/v1",
            *(f"Drafts: {line}" for line in self._drafts),
            f"Try:  curl {shlex.quote(f'{root}/v1/{path}')} {flags} -d {data}",
            *chat,
            *page,
            f"Logs: {self._workers[0].log.parent}",
            "Stop: Ctrl-C",
        ):
            out.print(line, markup=False)

    def _ready(self) -> bool:
        """Return whether requests for every model would be served, be it after they wake it."""
        try:
            ready = call(f"{self._url}{READY_PATH}", certificate=self._certificate)
        except OSError:
            return False
        with contextlib.suppress(KeyError, TypeError):
            self.missing = (ready.body or {})["error"]["message"]
        return ready.status == 200

    async def _ask_about(self, model: Starting) -> None:
        try:
            async with connect(model.scheduler) as channel:
                info = await SchedulerStub(channel).Info(
                    SchedulerInfoRequest(), timeout=_STATUS_TIMEOUT_S
                )
        except grpc.aio.AioRpcError:
            return  # it sleeps, or has just gone again; a hint is not worth a wait
        if info.headless and model.must_write:
            raise InvalidRequest(
                f"--runner generate: {model.name} writes no text, it makes embeddings",
                param="runner",
            )
        if info.drafter_fault:
            self.say(f"Warning: nothing is drafted: {info.drafter_fault}{self._of(model)}")
        if info.max_draft_tokens:
            drafts = f"{info.drafter}, up to {info.max_draft_tokens} tokens a step"
            if info.drafts_because:
                drafts += f" ({info.drafts_because}; --speculative-config none turns it off)"
            self._drafts.insert(0, f"{drafts}{self._of(model)}")
        self._embeds = info.headless or (Path(info.model_path) / _EMBEDDER).exists()

    def _of(self, model: Starting) -> str:
        """Return which model that is, where there are several."""
        return f" ({model.name})" if len(self._models) > 1 else ""

    async def _check_workers(self, stubs: Sequence[Any]) -> None:
        """Raise InvalidRequest when something has to change before a rank can start, Unavailable
        when it failed too often."""
        for worker, stub in zip(self._workers, stubs, strict=True):
            try:
                status = await stub.Status(pb.SupervisorStatusRequest(), timeout=_STATUS_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                continue  # the supervisor starts
            hopeless = status.failure_is_permanent or status.restarts >= _MAX_DEATHS
            if status.failure and hopeless:
                error = InvalidRequest if status.failure_is_permanent else Unavailable
                where = f"rank {status.rank} cannot start"
                raise error(f"{where}: {status.failure}\nFull log: {worker.log}")

    def _loaded(self) -> float | None:
        """Return the share of the weights that the slowest rank has loaded, if known."""
        found = [_LOADED.findall(text)[-1:] for text in self._read_logs()]
        return min((int(done) / int(total) for each in found for done, total in each), default=None)

    def _warnings(self) -> Iterator[str]:
        """Yield the warnings of the workers' logs."""
        for text in self._read_logs():
            lines = [line for line in text.splitlines() if _WARNING.search(line)]
            yield from (line.decode(errors="replace") for line in lines[:_MAX_WARNINGS])

    def _read_logs(self) -> Iterator[bytes]:
        """Yield what the workers have logged in this run."""
        for log, skip in self._skip.items():
            with contextlib.suppress(OSError), log.open("rb") as file:
                file.seek(skip)
                yield file.read()


def _this_command() -> str:
    """Return how `surestep` is called here: with its path where no shell would find it."""
    script = Path(sys.executable).with_name(_COMMAND)
    if shutil.which(_COMMAND) is not None:
        return _COMMAND
    return shlex.quote(str(script)) if script.exists() else f"{sys.executable} -m surestep_cli"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
