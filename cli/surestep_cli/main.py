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
from surestep_common.config import (
    USAGE_ERROR,
    Settings,
    hide_progress_bars,
    load,
    parent_pid,
)
from surestep_common.errors import InvalidRequest, SurestepError
from surestep_common.process import die_with

from .api.keys import one_key
from .api.server_url import URL, URL_IS
from .bench.command import Bench
from .chat.command import Chat
from .monitor.commands import Status, Top
from .settings.serve_settings import ServeSettings
from .settings.vllm_commands import hint_for

_ERROR = 1  # exit status
_INTERRUPTED = 130


class Serve(ServeSettings):
    """Serve a model over HTTP with gateway, scheduler and workers on this machine.

    Each flag --some-flag is also the variable SURESTEP_SOME_FLAG and the key some_flag of the YAML
    file that --config names; a flag beats a variable, a variable beats the file.
    """

    def run(self, console: Console) -> int:
        from .serve.launcher import launch

        return launch(self)


class Verify(Settings):
    """See whether speculation, company or lost workers change a token of a model's answers."""


class ImportGguf(Settings):
    """Convert a GGUF file into a folder in Hugging Face format."""

    gguf: CliPositionalArg[Path] = Field(description="GGUF file")
    folder: CliPositionalArg[Path] = Field(description="folder to create")

    def run(self, console: Console) -> int:
        from .commands import import_gguf

        import_gguf(self.gguf, self.folder, console)
        return 0


class Fetch(Settings):
    """Fetch a model as `serve` would and print its folder."""

    model: CliPositionalArg[str | None] = Field(
        default=None, description="folder, GGUF file or hub id; none = the default model"
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
        from .commands import fetch
        from .serve.hub import ModelSource

        fetch(self.model, self.link, ModelSource(self.revision), console, text_only=self.text_only)
        return 0


class RestartWorkers(Settings):
    """Replace the workers of a running server, one scheduler after the other; requests go on."""

    url: str = Field(default="http://127.0.0.1:8000", pattern=URL, description=URL_IS)
    admin_api_key: SecretStr | None = Field(
        default=None, description="the server's --admin-api-key"
    )
    admin_api_key_file: FilePath | None = Field(
        default=None, description="file that holds it, in its place"
    )
    reason: str | None = Field(default=None, description="for the server's log")

    def run(self, console: Console) -> int:
        """Return the exit status: 0 when everything serves again."""
        from .commands import restart_workers

        key = one_key(self.admin_api_key, self.admin_api_key_file)
        if key is None:
            raise InvalidRequest("--admin-api-key or --admin-api-key-file is needed")
        return restart_workers(self.url, key, self.reason, Console(highlight=False))


class NewSecret(Settings):
    """Draw a secret for --grpc-secret-file, unless the file is there already."""

    file: CliPositionalArg[Path] = Field(description="file to create, for its owner's eyes only")

    def run(self, console: Console) -> int:
        from .commands import new_secret

        new_secret(self.file)
        return 0


class Proto(Settings):
    """Print the protocol, for clients in other languages, or write its files into a folder."""

    folder: CliPositionalArg[Path | None] = Field(
        default=None, description="folder to write surestep_proto/*.proto into; none = stdout"
    )

    def run(self, console: Console) -> int:
        from .commands import proto

        proto(self.folder)
        return 0


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
    verify: CliSubCommand[Verify] = Field(
        description="see whether speculation or lost workers change a token"
    )
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
    top: CliSubCommand[Top] = Field(description="watch a running server")
    chat: CliSubCommand[Chat] = Field(description="talk to a running server")
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
        """Read the name of the command from the command line only."""
        return (init_settings,)


def main() -> None:
    """Entry point of the console script."""
    raise SystemExit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. SystemExit for `--help` and wrong flags."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        hide_progress_bars()
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1:], console)
    if arguments[:1] == ["verify"]:
        return _verify(arguments[1:], console)
    if (hint := hint_for(arguments)) is not None:
        console.print(f"surestep: {hint}", soft_wrap=True)
        return USAGE_ERROR
    top = load(Surestep, ["--version"] if arguments == ["-v"] else arguments)
    if top.version:
        Console(highlight=False).print(f"surestep {_version()}")
        return 0
    command = get_subcommand(top, is_required=False)
    if command is None:
        console.print("surestep: which command? `surestep --help` lists them")
        return USAGE_ERROR
    assert isinstance(
        command,
        ImportGguf | Fetch | Status | RestartWorkers | NewSecret | Proto | Top | Chat | Bench,
    )
    return _run(command, console)


def _serve(arguments: list[str], console: Console) -> int:
    for word in arguments:
        if word in ("-h", "--help") or word.startswith("--help="):
            from .settings.help import help_text

            topic = word.partition("=")[2] or None
            sys.stdout.write(help_text(Serve, topic, shutil.get_terminal_size().columns))
            return 0
    die_with(parent_pid())
    return _run(Serve.load(arguments), console)


def _verify(arguments: list[str], console: Console) -> int:
    from .verify.options import VerifyArguments, verify_help

    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(verify_help())
        return 0
    asking = VerifyArguments.of(arguments)
    try:
        from .verify.command import verify
    except ImportError as error:
        hint = f"surestep: `verify` needs {error.name}: pip install 'surestep[serve]'"
        console.print(hint, markup=False)
        return _ERROR
    try:
        return verify(asking, console)
    except KeyboardInterrupt:
        return _INTERRUPTED


class _Command(Protocol):
    def run(self, console: Console) -> int: ...


def _run(command: _Command, console: Console) -> int:
    try:
        return command.run(console)
    except SurestepError as error:
        console.print(f"surestep: {error}", markup=False, soft_wrap=True)
        return _ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED


def _version() -> str:
    try:
        return version("surestep")
    except PackageNotFoundError:
        return "(not installed)"
