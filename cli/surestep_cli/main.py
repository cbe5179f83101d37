"""The `surestep` command: reads settings, then hands over to one module per subcommand.

Each subcommand is a settings class whose `run` imports its implementation, so that `--help` and
wrong flags are answered without loading anything heavy.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from pydantic import Field, FilePath, SecretStr
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    CliPositionalArg,
    CliSubCommand,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    get_subcommand,
)
from rich.console import Console
from surestep_common.config import USAGE_ERROR, Settings, load
from surestep_common.errors import InvalidRequest, SurestepError

from .keys import one_key
from .serve_settings import ServeSettings

_ERROR = 1  # exit status
_URL = r"^(https?|unix)://"
_URL_IS = "address of the gateway; unix://PATH with %2F for / in it: a Unix socket"


class Serve(ServeSettings):
    """Serve a model over HTTP with gateway, scheduler and workers on this machine.

    Each flag --some-flag is also the variable SURESTEP_SOME_FLAG and the key some_flag of the YAML
    file that --config names; a flag beats a variable, a variable beats the file.
    """

    def run(self, console: Console) -> int:
        """Exit status."""
        from .launcher import launch

        return launch(self)


class ImportGguf(Settings):
    """Convert a GGUF file into a folder in Hugging Face format."""

    gguf: CliPositionalArg[Path] = Field(description="GGUF file")
    folder: CliPositionalArg[Path] = Field(description="folder to create")

    def run(self, console: Console) -> int:
        """Exit status."""
        from .commands import import_gguf

        import_gguf(self.gguf, self.folder, console)
        return 0


class Fetch(Settings):
    """Fetch a model as `serve` would and print its folder."""

    model: CliPositionalArg[str | None] = Field(
        default=None, description="folder or hub id; none = the default model"
    )
    link: Path | None = Field(
        default=None, description="symbolic link to create or to point to the folder"
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of a model of the hub"
    )
    text_only: CliImplicitFlag[bool] = Field(
        default=False, description="leave out the weights of a model of the hub: for a gateway"
    )

    def run(self, console: Console) -> int:
        """Exit status."""
        from .commands import fetch
        from .model_source import Source

        fetch(self.model, self.link, Source(self.revision), console, text_only=self.text_only)
        return 0


class ServerUrl(Settings):
    """What commands need that talk to a running server."""

    url: str = Field(default="http://127.0.0.1:8000", pattern=_URL, description=_URL_IS)
    api_key: SecretStr | None = Field(
        default=None, description="key that the server asks for, if it does"
    )
    api_key_file: FilePath | None = Field(
        default=None, description="file whose first key that is: other users see flags, not files"
    )

    def key(self) -> str | None:
        """The key to show. Raises InvalidRequest."""
        return one_key(self.api_key, self.api_key_file)


class Status(ServerUrl):
    """List gateway, scheduler, supervisors and ranks of a running server."""

    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print the server's answer as JSON"
    )

    def run(self, console: Console) -> int:
        """Exit status: 0 when everything serves, 1 when not."""
        from .status import show

        return show(self.url, self.key(), as_json=self.json_output, console=Console())


class RestartWorkers(Settings):
    """Replace the workers of a running server, one scheduler after the other; requests go on."""

    url: str = Field(default="http://127.0.0.1:8000", pattern=_URL, description=_URL_IS)
    admin_api_key: SecretStr | None = Field(
        default=None, description="the server's --admin-api-key"
    )
    admin_api_key_file: FilePath | None = Field(
        default=None, description="file that holds it, in its place"
    )
    reason: str | None = Field(default=None, description="for the server's log")

    def run(self, console: Console) -> int:
        """Exit status: 0 when everything serves again."""
        from .commands import restart_workers

        key = one_key(self.admin_api_key, self.admin_api_key_file)
        if key is None:
            raise InvalidRequest("--admin-api-key or --admin-api-key-file is needed")
        return restart_workers(self.url, key, self.reason, Console(highlight=False))


class NewSecret(Settings):
    """Draw a secret for --grpc-secret-file, unless the file is there already."""

    file: CliPositionalArg[Path] = Field(description="file to create, for its owner's eyes only")

    def run(self, console: Console) -> int:
        """Exit status."""
        from .commands import new_secret

        new_secret(self.file)
        return 0


class Proto(Settings):
    """Print the protocol, for clients in other languages, or write its files into a folder."""

    folder: CliPositionalArg[Path | None] = Field(
        default=None, description="folder to write surestep_proto/*.proto into; none = stdout"
    )

    def run(self, console: Console) -> int:
        """Exit status."""
        from .commands import proto

        proto(self.folder)
        return 0


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

    def run(self, console: Console) -> int:
        """Exit status: 0 when no request failed."""
        from .bench import bench

        return bench(self, console)


class Surestep(BaseSettings):
    """LLM serving whose speculative decoding you can leave on."""

    model_config = SettingsConfigDict(
        cli_prog_name="surestep",
        cli_kebab_case=True,
        cli_exit_on_error=False,
        cli_implicit_flags="dual",
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    version: CliImplicitFlag[bool] = Field(default=False, description="print the version and exit")
    serve: CliSubCommand[Serve] = Field(description="serve a model on this machine")
    import_gguf: CliSubCommand[ImportGguf] = Field(description="convert a GGUF file")
    fetch: CliSubCommand[Fetch] = Field(description="fetch a model and print its folder")
    status: CliSubCommand[Status] = Field(description="list the processes of a running server")
    restart_workers: CliSubCommand[RestartWorkers] = Field(
        description="replace the workers of a running server"
    )
    new_secret: CliSubCommand[NewSecret] = Field(
        description="draw a secret for services that are started one by one"
    )
    proto: CliSubCommand[Proto] = Field(description="print or write the .proto files")
    bench: CliSubCommand[Bench] = Field(description="measure a running server")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Which command runs is said on the command line only."""
        return (init_settings,)


def main() -> None:
    """Entry point of the console script."""
    raise SystemExit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. SystemExit for `--help` and wrong flags."""
    console = Console(stderr=True, highlight=False)
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1:], console)
    top = load(Surestep, arguments)
    if top.version:
        Console(highlight=False).print(f"surestep {_version()}")
        return 0
    command = get_subcommand(top, is_required=False)
    if command is None:
        console.print("surestep: which command? `surestep --help` lists them")
        return USAGE_ERROR
    assert isinstance(
        command, ImportGguf | Fetch | Status | RestartWorkers | NewSecret | Proto | Bench
    )
    return _run(command, console)


def _serve(arguments: list[str], console: Console) -> int:
    for word in arguments:
        if word in ("-h", "--help") or word.startswith("--help="):
            from .help import help_text

            topic = word.partition("=")[2] or None
            sys.stdout.write(help_text(Serve, topic, shutil.get_terminal_size().columns))
            return 0
    return _run(Serve.load(arguments), console)


class _Command(Protocol):
    def run(self, console: Console) -> int: ...


def _run(command: _Command, console: Console) -> int:
    try:
        return command.run(console)
    except SurestepError as error:
        console.print(f"surestep: {error}", markup=False, soft_wrap=True)
        return _ERROR
    except KeyboardInterrupt:
        return 130


def _version() -> str:
    try:
        return version("surestep")
    except PackageNotFoundError:
        return "(not installed)"
