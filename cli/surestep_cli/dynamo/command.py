"""`surestep dynamo`: its flags."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field, FilePath, SecretStr
from pydantic_settings import CliPositionalArg
from rich.console import Console
from surestep_common.config import Settings, variables
from surestep_common.errors import InvalidRequest

_TRIED = "1.6.1"
_INSTALL = f"pip install --no-deps ai-dynamo=={_TRIED} ai-dynamo-runtime=={_TRIED}"
_log = logging.getLogger(__name__)


def _of_dynamo(name: str, default: Any) -> Any:
    """Return one of the variables that Dynamo's other processes read."""
    return variables("DYN_").get(f"DYN_{name}", default)


def warn_of_another(installed: str) -> None:
    """Say which release was tried where another one is installed."""
    if installed != _TRIED:
        _log.warning("ai-dynamo %s is installed, and only %s was tried", installed, _TRIED)


class Dynamo(Settings):
    """Serve a running scheduler's model as a worker of NVIDIA Dynamo."""

    model: CliPositionalArg[Path | None] = Field(
        default=None, description="folder with the tokenizer; none = that of the served model"
    )
    scheduler: str = Field(
        default="127.0.0.1:50051", description="the scheduler: HOST:PORT or unix:/PATH"
    )
    grpc_api_key: SecretStr | None = Field(
        default=None, description="key of the scheduler, one of its --grpc-api-key"
    )
    ssl_ca_certs: FilePath | None = Field(
        default=None, description="certificates to trust, where the scheduler speaks TLS"
    )
    served_model_name: str | None = Field(
        default=None, description="name that clients ask for; none = that of the folder"
    )
    namespace: str = Field(
        default_factory=lambda: _of_dynamo("NAMESPACE", "dynamo"),
        description="Dynamo's namespace; default: DYN_NAMESPACE, or dynamo",
    )
    component: str = Field(default="backend", description="component of the namespace")
    endpoint: str = Field(default="generate", description="endpoint of the component")
    discovery_backend: str = Field(
        default_factory=lambda: _of_dynamo("DISCOVERY_BACKEND", "etcd"),
        description="how workers are found: etcd, file, kubernetes, mem; default: "
        "DYN_DISCOVERY_BACKEND, or etcd",
    )
    request_plane: str = Field(
        default_factory=lambda: _of_dynamo("REQUEST_PLANE", "tcp"),
        description="how requests come: tcp, nats; default: DYN_REQUEST_PLANE, or tcp",
    )
    event_plane: str | None = Field(
        default_factory=lambda: _of_dynamo("EVENT_PLANE", None),
        description="how events go: zmq, nats; default: DYN_EVENT_PLANE, or Dynamo's own",
    )
    kv_events_endpoint: str | None = Field(
        default=None,
        pattern="^(tcp|ipc)://",
        description="where the scheduler publishes KV events, e.g. tcp://HOST:5557: the router "
        "then sends prompts to the worker that has their beginning",
    )
    kv_events_topic: str = Field(default="", description="topic of these events")
    dyn_tool_call_parser: str | None = Field(
        default=None, description="tool parser of Dynamo's frontend"
    )
    dyn_reasoning_parser: str | None = Field(
        default=None, description="reasoning parser of Dynamo's frontend"
    )
    retry_for_s: float = Field(
        default=30.0,
        ge=0,
        description="seconds without a token for which a lost scheduler is waited for, before the "
        "frontend may try another worker",
    )

    def run(self, console: Console) -> int:
        """Serve until a signal. Raise InvalidRequest without Dynamo's packages, or with others."""
        try:
            import uvloop

            from .engine import serve
        except ImportError as error:
            raise InvalidRequest(f"no Dynamo that fits: {error}; {_INSTALL}") from error
        warn_of_another(version("ai-dynamo-runtime"))
        uvloop.run(serve(self))
        return 0
