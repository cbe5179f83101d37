"""The commands that talk to a running server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, FilePath, SecretStr, field_validator
from pydantic_settings import (
    CliImplicitFlag,
    CliPositionalArg,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
)
from rich.console import Console
from surestep_common.config import ENV_PREFIX, Settings
from surestep_common.errors import SurestepError

from .api.keys import one_key
from .terminal.output import writable

URL = r"^(https?|unix)://"
URL_IS = "address of the gateway; unix://PATH with %2F for / in it: a Unix socket"


class ServerUrl(Settings):
    """What commands need that talk to a running server.

    That is what they read from variables and files too: other names there are settings of servers.
    """

    url: str = Field(default="http://127.0.0.1:8000", pattern=URL, description=URL_IS)
    api_key: SecretStr | None = Field(
        default=None, description="key that the server asks for, if it does"
    )
    api_key_file: FilePath | None = Field(
        default=None, description="file whose first key that is: other users see flags, not files"
    )

    @classmethod
    def sources(
        cls, init: PydanticBaseSettingsSource, env: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """See Settings.sources; of the variables, those of the fields of this class."""
        return super().sources(init, _Address(cls, env_prefix=ENV_PREFIX))

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """See Settings.from_file."""
        return _of_clients(super().from_file(content))

    def key(self) -> str | None:
        """The key to show. Raises InvalidRequest."""
        return one_key(self.api_key, self.api_key_file)


class _Address(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        return _of_clients(super().__call__())


def _of_clients(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ServerUrl.model_fields}


class Status(ServerUrl):
    """List gateway, scheduler, supervisors and ranks of a running server."""

    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print the server's answer as JSON"
    )

    def run(self, console: Console) -> int:
        """Exit status: 0 when everything serves, 1 when not."""
        from .monitor.status import show

        return show(self.url, self.key(), as_json=self.json_output, console=Console())


class Top(ServerUrl):
    """Watch a running server: a live view in a terminal, a line for each look elsewhere."""

    interval_s: float = Field(default=1.0, gt=0, description="seconds between two looks")
    updates: int | None = Field(default=None, ge=1, description="looks; none = until Ctrl-C")

    def run(self, console: Console) -> int:
        """Exit status."""
        try:
            from .monitor.top import top
        except ImportError as error:
            raise missing("top", error) from error
        return top(
            self.url,
            self.key(),
            interval_s=self.interval_s,
            updates=self.updates,
            console=Console(highlight=False),
        )


class Chat(ServerUrl):
    """Talk to a running server. With a prompt, or with text on standard input: one answer."""

    prompt: CliPositionalArg[list[str]] = Field(
        default_factory=list, description="what to ask; none = a conversation"
    )
    model: str | None = Field(
        default=None, description="name of the model; none = the server's first"
    )
    system: str | None = Field(default=None, description="what the model is told before all else")
    temperature: float | None = Field(
        default=None, ge=0, description="none = the model's own default"
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="longest answer; none = what the server allows"
    )
    seed: int | None = Field(default=None, description="none = another one for each answer")
    extra: dict[str, object] = Field(
        default_factory=dict, description="JSON merged into every request body"
    )
    timeout_s: float = Field(default=300.0, gt=0, description="seconds of silence that are borne")

    def run(self, console: Console) -> int:
        """Exit status: 0 when there was an answer."""
        from .chat.chat import run_chat
        from .chat.conversation import Conversation, first_model

        chosen: dict[str, Any] = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        fields = {name: value for name, value in chosen.items() if value is not None}
        fields |= {"model": self.model or first_model(self.url, self.key()), **self.extra}
        chat = Conversation(self.url, self.key(), fields, self.timeout_s, self.system)
        return run_chat(chat, self.prompt, Console(highlight=False))


def missing(command: str, error: ImportError) -> SurestepError:
    """What to install for a command."""
    return SurestepError(f"`surestep {command}` needs {error.name}: pip install 'surestep[serve]'")


class Bench(ServerUrl):
    """Send requests to a running server and report throughput and latencies."""

    model: str | None = Field(
        default=None, description="name of the model; none = the server's first"
    )
    concurrency: int = Field(default=8, ge=1, description="requests open at once")
    num_requests: int = Field(default=32, ge=1, description="requests in all")
    num_warmup: int = Field(default=0, ge=0, description="requests sent first and not counted")
    max_tokens: int = Field(default=128, ge=1, description="tokens generated per request")
    prompt_tokens: int = Field(
        default=64, ge=1, description="length of the prompts, about, in tokens"
    )
    prompt_kind: str = Field(
        default="random", pattern="^(random|repeat)$", description="random, or repeat: drafts well"
    )
    seed: int = Field(default=0, description="another seed = other prompts")
    extra: dict[str, object] = Field(
        default_factory=dict, description="JSON merged into every request body"
    )
    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print one JSON object"
    )
    picture: Path | None = Field(
        default=None, description="file to draw speed and latencies into, .svg"
    )

    @field_validator("picture")
    @classmethod
    def _can_be_written(cls, path: Path | None) -> Path | None:
        return None if path is None else writable(path, (".svg",))

    def run(self, console: Console) -> int:
        """Exit status: 0 when no request failed."""
        from .bench.bench import bench

        return bench(self, console)
