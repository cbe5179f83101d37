"""The `surestep` command: a table of commands, each a settings class with a method `run`.

`run` imports its implementation, so that `--help` and wrong flags are answered without loading
anything heavy.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Protocol, cast

from pydantic import Field, create_model
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
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

from .bench.command import Bench
from .chat.command import Chat
from .commands import CollectEnv, Fetch, NewSecret, Proto, RestartWorkers
from .dynamo.command import Dynamo
from .monitor.commands import Status, Top
from .settings.foreign_commands import hint_for
from .settings.serve_settings import ServeSettings
from .zoo.command import Zoo

_ERROR = 1  # exit status
_INTERRUPTED = 130


class Runnable(Protocol):
    """A command whose words were read."""

    def run(self, console: Console) -> int:
        """Return the exit status. Raise SurestepError."""


class Text(NamedTuple):
    """A text that was asked for, such as help."""

    text: str

    def run(self, console: Console) -> int:
        sys.stdout.write(self.text)
        return 0


class Serve(ServeSettings):
    """Serve a model over HTTP with gateway, scheduler and workers on this machine.

    Each flag --some-flag is also the variable SURESTEP_SOME_FLAG and the key some_flag of the YAML
    file that --config names; a flag beats a variable, a variable beats the file.
    """

    @classmethod
    def read(cls, arguments: list[str]) -> Runnable:
        """Read flags in vLLM's forms too, and topics of help."""
        for word in arguments:
            if word in ("-h", "--help") or word.startswith("--help="):
                from .settings.help import help_text

                topic = word.partition("=")[2] or None
                return Text(help_text(cls, topic, shutil.get_terminal_size().columns))
        die_with(parent_pid())
        return cls.load(arguments)

    def run(self, console: Console) -> int:
        from .serve.launcher import launch

        return launch(self)


class Verify(Settings):
    """See whether speculation, company or lost workers change a token of a model's answers."""

    @classmethod
    def read(cls, arguments: list[str]) -> Runnable:
        """Read a few flags of its own and, for the server that it starts, those of `serve`."""
        from .verify.options import VerifyArguments, verify_help

        if {"-h", "--help"} & set(arguments):
            return Text(verify_help())
        return VerifyArguments.of(arguments)


class Command(NamedTuple):
    """A command: its settings, its line of help, and a reader of its own, if it has one."""

    settings: type[Settings]
    about: str
    read: Callable[[list[str]], Runnable] | None = None


COMMANDS = {
    "serve": Command(Serve, "serve a model on this machine", Serve.read),
    "verify": Command(
        Verify, "see whether speculation or lost workers change a token", Verify.read
    ),
    "zoo": Command(Zoo, "look for published failures of serving engines in any server"),
    "fetch": Command(Fetch, "fetch a model and print its folder"),
    "status": Command(Status, "list the processes of a running server"),
    "restart-workers": Command(RestartWorkers, "replace the workers of a running server"),
    "new-secret": Command(NewSecret, "draw a secret for services that are started one by one"),
    "proto": Command(Proto, "print or write the .proto files"),
    "top": Command(Top, "watch a running server"),
    "chat": Command(Chat, "talk to a running server"),
    "bench": Command(Bench, "measure a running server"),
    "dynamo": Command(Dynamo, "serve a running scheduler's model as a worker of NVIDIA Dynamo"),
    "collect-env": Command(CollectEnv, "print the facts that a report of a fault needs"),
}


class _Surestep(BaseSettings):
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

    def run(self, console: Console) -> int:
        """Refuse to do nothing."""
        console.print("surestep: which command? `surestep --help` lists them")
        return USAGE_ERROR


_FIELDS: dict[str, Any] = {
    name.replace("-", "_"): (
        cast(Any, CliSubCommand)[command.settings],
        Field(description=command.about),
    )
    for name, command in COMMANDS.items()
}
Surestep = create_model("Surestep", __base__=_Surestep, __doc__=_Surestep.__doc__, **_FIELDS)


def main() -> None:
    """Entry point of the console script."""
    raise SystemExit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. SystemExit for wrong flags and most help."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        hide_progress_bars()
    if (hint := hint_for(arguments, COMMANDS)) is not None:
        console.print(f"surestep: {hint}", markup=False, soft_wrap=True)
        return USAGE_ERROR
    try:
        return _read(arguments).run(console)
    except SurestepError as error:
        console.print(f"surestep: {error}", markup=False, soft_wrap=True)
        return USAGE_ERROR if isinstance(error, InvalidRequest) else _ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED


def _read(arguments: list[str]) -> Runnable:
    command = COMMANDS.get(next(iter(arguments), ""))
    if command is not None and command.read is not None:
        return command.read(arguments[1:])
    top = load(Surestep, ["--version"] if arguments == ["-v"] else arguments)
    if top.version:
        return Text(f"surestep {_version()}\n")
    return cast(Runnable, get_subcommand(top, is_required=False) or top)


def _version() -> str:
    try:
        return version("surestep")
    except PackageNotFoundError:
        return "(not installed)"
