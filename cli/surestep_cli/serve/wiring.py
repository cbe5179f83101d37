"""The addresses of the services, and the variables that pass them on."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from urllib.parse import quote

from pydantic import SecretStr
from surestep_common.config import ENV_PREFIX

from surestep_cli.settings.serve_settings import ServeSettings

from .model_source import ModelFolder
from .ports import free_addresses

SECRET_BYTES = 32


def with_secret(settings: ServeSettings) -> ServeSettings:
    """Return the settings with a secret for the gRPC ports: the user's, or a new one."""
    if settings.read_grpc_secret() is not None:
        return settings
    return settings.model_copy(
        update={"grpc_secret": SecretStr(secrets.token_urlsafe(SECRET_BYTES))}
    )


def wiring(
    settings: ServeSettings, model: ModelFolder, tokenizer: Path | None = None
) -> dict[str, str]:
    """Return the variables for all services: the user's settings, and free addresses."""
    ranks = settings.tensor_parallel_size
    free = free_addresses(
        {
            "port": 1,
            "scheduler_listen": 1,
            "tp_master": 1,
            "supervisor_listen": ranks,
            "worker_listen": ranks,
        }
    )
    given = {name: str(getattr(settings, name)) for name in free.keys() & settings.model_fields_set}
    listen = {**free, **given}
    urls = settings.scheduler_url if "scheduler_url" in settings.model_fields_set else ()
    wired = {
        **listen,
        "model": str(model.path),
        "port": str(settings.port or free["port"].rpartition(":")[2]),
        "served_model_name": ",".join(settings.served_model_name) or model.name,
        "scheduler_url": ",".join(urls or (listen["scheduler_listen"],)),
        "supervisor_addresses": json.dumps(consecutive(listen["supervisor_listen"], ranks)),
    }
    if tokenizer is not None:
        wired["tokenizer"] = str(tokenizer)
    return {**settings.environ(), **{ENV_PREFIX + k.upper(): v for k, v in wired.items()}}


def consecutive(address: str, count: int) -> list[str]:
    """Return `address` and the ones on the next ports."""
    host, _, port = address.rpartition(":")
    return [f"{host}:{int(port) + i}" for i in range(count)]


def public_url(settings: ServeSettings, port: str) -> str:
    """Return the URL at which clients on this machine reach the server."""
    if settings.uds is not None:
        return f"unix://{quote(str(settings.uds.absolute()), safe='')}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{host}:{port}"
