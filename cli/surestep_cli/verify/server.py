"""The server under test: one started as `serve` would start it, or a running one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
from pydantic import SecretStr
from rich.console import Console
from surestep_common.config import PARENT_PID, child_environ, variables
from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_common.gguf import is_gguf, model_folder
from surestep_common.model_files import read_object
from surestep_common.process import python_module

from surestep_cli.api.http import call
from surestep_cli.api.keys import one_key
from surestep_cli.api.metrics import Metrics
from surestep_cli.api.responses import model_card
from surestep_cli.serve.fetch import fetch
from surestep_cli.serve.ports import free_addresses
from surestep_cli.serve.wiring import public_url
from surestep_cli.settings.serve_settings import ServeSettings

from .answers import get, get_text
from .options import VerifyArguments

_LOOK_S = 0.1
_STOP_S = 20.0
_LONGEST = 2048  # tokens, of a server without a limit of its own
_CLIENT_CERTIFICATES_NEEDED = 2  # of --ssl-cert-reqs


class ServerUnderTest(NamedTuple):
    """The server's URL; `pid` is the launcher's, None for a server not started here."""

    url: str
    api_key: SecretStr | None
    certificate: Path | None = None
    pid: int | None = None


class About(NamedTuple):
    """The server's facts about itself."""

    model: str
    temperature: float | None  # default of requests, None if that is 0 or unknown
    max_model_len: int | None
    is_surestep: bool
    num_slots: int = 0  # requests that run at once; 0 = unknown


def key_of(settings: ServeSettings) -> SecretStr | None:
    """Return the first of the server's keys, or the key for a running server."""
    return settings.api_key[0] if settings.api_key else one_key(None, settings.api_key_file)


def shortened(asking: VerifyArguments, console: Console) -> int | None:
    """Return a --max-model-len that prompts reach within seconds, for a model that has a longer one
    and where the flags ask for none.
    """
    if not asking.may_be_shortened:
        return None
    try:
        folder = fetch(asking.serve, console).model.path
        folder = model_folder(folder) if is_gguf(folder) else folder
        config = read_object(folder / "config.json")
    except SurestepError:
        return None  # the server tells what is wrong with it
    own = config.get("text_config", config).get("max_position_embeddings") or 0
    return _LONGEST if own > _LONGEST else None


async def about(session: aiohttp.ClientSession, name: str | None) -> About:
    """Describe the model called `name`, or the first one. Raise Unavailable and InvalidRequest."""
    card = model_card(await get(session, "v1/models"), name)
    defaults = card.get("default_sampling_params") or {}
    try:
        metrics = Metrics(await get_text(session, "metrics"))
    except SurestepError:
        metrics = Metrics("")
    ours, slots = "surestep:steps_total" in metrics, int(metrics.total("surestep:slots"))
    longest = card.get("max_model_len")
    return About(card["id"], defaults.get("temperature") or None, longest, ours, slots)


@contextlib.asynccontextmanager
async def started(
    settings: ServeSettings, arguments: Sequence[str]
) -> AsyncIterator[ServerUnderTest]:
    """Run `surestep serve` with these arguments in its own process, ended with the context.

    The server owns the console until it is ready. Raise Unavailable, InvalidRequest.
    """
    if settings.ssl_cert_reqs >= _CLIENT_CERTIFICATES_NEEDED:
        raise InvalidRequest("--ssl-cert-reqs 2: this command has no certificate to show")
    port = str(settings.port) if "port" in settings.model_fields_set and settings.port else ""
    if not port and settings.uds is None:
        port = free_addresses({"port": 1})["port"].rpartition(":")[2]
        arguments = [*arguments, "--port", port]
    url = public_url(settings, port)
    process = await _spawn(arguments)
    try:
        await _ready(process, url, settings.ssl_certfile)
        yield ServerUnderTest(url, key_of(settings), settings.ssl_certfile, process.pid)
    finally:
        await _stop(process)


async def _spawn(arguments: Sequence[str]) -> asyncio.subprocess.Process:
    """Start the process, which ends with this one in any case."""
    environ = {**child_environ(variables("SURESTEP_")), PARENT_PID: str(os.getpid())}
    return await asyncio.create_subprocess_exec(
        *python_module("surestep_cli", "serve", *arguments),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,  # the announcement is not needed here
        start_new_session=True,  # Ctrl-C reaches this process alone
    )


async def _ready(process: asyncio.subprocess.Process, url: str, certificate: Path | None) -> None:
    while process.returncode is None:
        with contextlib.suppress(OSError):
            path = f"{url}/health/ready"
            if (await asyncio.to_thread(call, path, certificate=certificate)).status == 200:
                return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _LOOK_S)
    raise Unavailable("the server did not start; the reason stands above")


async def _stop(process: asyncio.subprocess.Process) -> None:
    try:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
