"""The addresses of the services, and the variables that pass them on."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import SecretStr
from surestep_common import addresses
from surestep_common.config import ENV_PREFIX, runtime_dir
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.settings.model_list import OF_THE_SERVER

from surestep_cli.settings.serve_settings import ServeSettings

from .model_source import ModelFolder
from .ports import free_addresses

SECRET_BYTES = 32
_PREFIX = "surestep-"
_MOST_MODELS = 99  # in as many folders
_SERVICES = ("scheduler_listen", "supervisor_listen", "worker_listen")
_SHARED = OF_THE_SERVER - {"models"}
_WIRED = ("model", "tokenizer", "served_model_name", "scheduler_url")


def with_secret(settings: ServeSettings) -> ServeSettings:
    """Return the settings with a secret for the gRPC ports: the user's, or a new one."""
    if settings.read_grpc_secret() is not None:
        return settings
    return settings.model_copy(
        update={"grpc_secret": SecretStr(secrets.token_urlsafe(SECRET_BYTES))}
    )


@contextlib.contextmanager
def socket_folder(settings: ServeSettings) -> Iterator[Path | None]:
    """A folder that this user alone may enter, for the sockets of the services; None without one.

    With TLS, which keeps strangers out as well, services listen on ports: certificates name hosts.
    """
    folder = _new_folder() if settings.grpc_tls_cert is None else None
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder() -> Path | None:
    """Make a folder whose name leaves room for that of a socket."""
    for place in filter(None, (runtime_dir(), tempfile.gettempdir())):
        longest = max(map(_socket, _SERVICES), key=len)
        if addresses.is_fit(f"{place}/{_PREFIX}......../{_MOST_MODELS}/{longest}"):
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    return None


def _socket(setting: str) -> str:
    return setting.removesuffix("_listen")


def wiring(
    settings: ServeSettings,
    model: ModelFolder,
    tokenizer: Path | None = None,
    sockets: Path | None = None,
) -> dict[str, str]:
    """Return the variables for all services: the user's settings, and where each listens.

    That is a socket below `sockets`, or else a free port of the loopback interface.
    """
    ranks = settings.tensor_parallel_size
    widths = {"port": 1, "tp_master": 1}
    if sockets is None:
        widths |= dict(zip(_SERVICES, (1, ranks, ranks), strict=True))
    free = free_addresses(widths)
    if sockets is not None:
        free |= {name: f"{addresses.UNIX}{sockets / _socket(name)}" for name in _SERVICES}
    given = {name: str(getattr(settings, name)) for name in free.keys() & settings.model_fields_set}
    listen = {**free, **given}
    urls = settings.scheduler_url if "scheduler_url" in settings.model_fields_set else ()
    wired = {
        **listen,
        "model": str(model.path),
        "port": str(settings.port or free["port"].rpartition(":")[2]),
        "served_model_name": ",".join(settings.served_model_name) or model.name,
        "scheduler_url": ",".join(urls or (listen["scheduler_listen"],)),
        "supervisor_addresses": json.dumps(
            [addresses.nth(listen["supervisor_listen"], rank) for rank in range(ranks)]
        ),
    }
    if tokenizer is not None:
        wired["tokenizer"] = str(tokenizer)
    return {**settings.environ(), **{ENV_PREFIX + k.upper(): v for k, v in wired.items()}}


def gateway_environ(each: Sequence[tuple[ServeSettings, Mapping[str, str]]]) -> dict[str, str]:
    """Return the variables of the gateway for models with their own settings and variables.

    One model's are its own; those of several are entries of a list, over what they share.
    """
    if len(each) == 1:
        return dict(each[0][1])
    shared = {
        ENV_PREFIX + name.upper(): value
        for name, value in ((name, each[0][1].get(ENV_PREFIX + name.upper())) for name in _SHARED)
        if value is not None
    }
    entries = [_entry(one, environ) for one, environ in each]
    return {**shared, f"{ENV_PREFIX}MODELS": json.dumps(entries)}


def _entry(settings: ServeSettings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what the gateway has to know of one model alone."""
    own = (
        (settings.model_fields_set & GatewaySettings.model_fields.keys())
        - OF_THE_SERVER
        - {*_WIRED}
    )
    wired = {name: environ.get(ENV_PREFIX + name.upper()) for name in _WIRED}
    found = {name: value for name, value in wired.items() if value is not None}
    return settings.model_dump(mode="json", include=own, exclude_none=True) | found


def public_url(settings: ServeSettings, port: str) -> str:
    """Return the URL at which clients on this machine reach the server."""
    if settings.uds is not None:
        return f"unix://{quote(str(settings.uds.absolute()), safe='')}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{host}:{port}"
