"""A server in a process of its own: for commands, benchmarks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import NamedTuple

from pydantic import SecretStr
from surestep_common.config import PARENT_PID, child_environ, variables
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.process import python_module

from surestep_cli.api.http import call, one_key
from surestep_cli.settings.serve_settings import ServeSettings

from .ports import free_addresses
from .startup import READY_PATH
from .wiring import public_url

_LOOK_S = 0.05
_STOP_S = 30.0
_CLIENT_CERTIFICATES_NEEDED = 2  # of --ssl-cert-reqs


class Server(NamedTuple):
    """A server that is ready. `process` is its launcher."""

    url: str
    process: Popen[bytes]
    settings: ServeSettings


def key_of(settings: ServeSettings) -> SecretStr | None:
    """Return the first of the server's keys, or the key for a running server."""
    return settings.api_key[0] if settings.api_key else one_key(None, settings.api_key_file)


@contextlib.asynccontextmanager
async def serving(
    model: Path | str | None = None,
    words: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
    within: Sequence[str] = (),
    **flags: object,
) -> AsyncIterator[Server]:
    """Run `surestep serve MODEL WORDS --FLAG VALUE ...`, ended with the context.

    Without a port or a socket it gets a free port. `environ` replaces the environment, with which
    the server would end with this process in any case. Output goes to `log`; without one, reasons
    why it does not start go to stderr. `within` is a command that becomes the one behind it.
    Raise Unavailable when the server ends before it is ready, InvalidRequest when it would want a
    certificate, SettingsError or ValidationError for wrong flags.
    """
    named = (word for name, value in flags.items() for word in (_flag(name), str(value)))
    arguments = [*([] if model is None else [str(model)]), *words, *named]
    settings = ServeSettings.of_flags(arguments)
    if settings.ssl_cert_reqs >= _CLIENT_CERTIFICATES_NEEDED:
        raise InvalidRequest("--ssl-cert-reqs 2: this command has no certificate to show")
    port = str(settings.port) if "port" in settings.model_fields_set and settings.port else ""
    if not port and settings.uds is None:
        port = free_addresses({"port": 1})["port"].rpartition(":")[2]
        arguments += ["--port", port]
    command = [*within, *python_module("surestep_cli", "serve", *arguments)]
    if environ is None:
        environ = {**child_environ(variables("SURESTEP_")), PARENT_PID: str(os.getpid())}
    server = Server(public_url(settings, port), _spawn(command, environ, log), settings)
    async with _ending(server.process):
        while not await asyncio.to_thread(is_ready, server):
            if server.process.poll() is not None:
                raise Unavailable(f"the server did not start; {_reason(log)}")
            await asyncio.sleep(_LOOK_S)
        yield server


def is_ready(server: Server) -> bool:
    """Return whether the server accepts requests."""
    with contextlib.suppress(OSError):
        path = f"{server.url}{READY_PATH}"
        return call(path, certificate=server.settings.ssl_certfile).status == 200
    return False


@contextlib.asynccontextmanager
async def running(command: Sequence[str], log: Path) -> AsyncIterator[Popen[bytes]]:
    """Run any command, such as another server's, ended with the context. Output goes to `log`.

    A `surestep serve` does not outlive this process either.
    """
    process = _spawn(command, {**variables(""), PARENT_PID: str(os.getpid())}, log)
    async with _ending(process):
        yield process


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _reason(log: Path | None) -> str:
    return "the reason stands above" if log is None else f"see {log}"


def _spawn(
    command: Sequence[str], environ: Mapping[str, str] | None, log: Path | None
) -> Popen[bytes]:
    """Start a process whose session is its own, so that Ctrl-C reaches this one alone."""
    with contextlib.ExitStack() as stack:
        out, err = DEVNULL, None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            out, err = stack.enter_context(log.open("ab")).fileno(), STDOUT
        return Popen(  # noqa: S603  # a command of ours, or of the caller
            command, env=environ, stdin=DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


@contextlib.asynccontextmanager
async def _ending(process: Popen[bytes]) -> AsyncIterator[None]:
    """End a process at the end, and in any case all that is left of its session."""
    try:
        yield
    finally:
        try:
            process.terminate()
            with contextlib.suppress(TimeoutExpired):
                await asyncio.to_thread(process.wait, _STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
