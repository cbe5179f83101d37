"""Settings of `surestep verify`: a few of its own, and every flag of `serve`."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, FilePath, field_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict, SettingsError
from rich.console import Console
from surestep_common.config import Names, Settings, load, or_exit
from surestep_common.errors import SurestepError

from surestep_cli.api.http import URL, Url
from surestep_cli.settings.flags import FlagReader
from surestep_cli.settings.help import declared, entry
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_cli.terminal.output import writable

from .faults import FAULTS
from .reference import TRANSFORMERS

_PROGRAM = "surestep verify"
_REPORTS = (".json", ".html")
# A running server has its settings; only the model and the key can be given here.
_WITH_URL = {"model", "api_key", "api_key_file"}
_DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
_INTRODUCTION = """\
Usage: surestep verify [MODEL] [FLAG ...]
       surestep verify --url URL [NAME] [FLAG ...]

Start the server that `surestep serve` would start with these flags, and see whether speculation,
company, preemption and lost processes change a single token, and whether the tokens are the
model's. Exit status: 0 every token is equal, 1 one is not or a request was lost, 2 it could not be
found out: too little was drafted, killed or met the limit.

"""
_MORE = """\

All other flags are those of `surestep serve`: see `surestep serve --help`. Where they turn
speculation off, n-gram drafts are added, for there would be nothing to verify; without
--max-model-len, 2048 tokens are the limit of models that have a longer one. With --url only NAME
(of the model) and --api-key or --api-key-file may stand beside these.
"""


class VerifyOptions(Settings):
    """The settings of `verify` besides those of the server it starts."""

    model_config = SettingsConfigDict(cli_prog_name=_PROGRAM)

    url: Url | None = Field(
        default=None, description="verify this running server instead, without faults"
    )
    prompts: FilePath | None = Field(
        default=None,
        description="prompts, one a line; in a .jsonl file bodies of OpenAI requests; "
        "none = fourteen of our own",
    )
    max_tokens: int = Field(
        default=64, ge=2, description="tokens generated where a prompt's body does not say"
    )
    temperature: float | None = Field(
        default=None,
        gt=0,
        description="of sampled answers where a prompt does not say; none = the model's own, or 1",
    )
    faults: Names = Field(
        default=tuple(FAULTS),
        description="faults in mid-stream: a worker killed or stopped, the scheduler or a "
        "supervisor killed; none = no faults",
    )
    reference: str | None = Field(
        default=None,
        description="second opinion: transformers (with the served checkpoint), the URL of another "
        "server, or a .jsonl file of `prompt` and `token_ids`",
    )
    quick: CliImplicitFlag[bool] = Field(
        default=False, description="one round in place of three: tokens, and nothing about speed"
    )
    patience_s: float = Field(
        default=120.0, gt=0, description="seconds without a token after which a request is lost"
    )
    report: Path | None = Field(default=None, description="file to write, .html or .json")
    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print the report as one JSON object"
    )

    @field_validator("faults")
    @classmethod
    def _known(cls, faults: tuple[str, ...]) -> tuple[str, ...]:
        wanted = tuple(dict.fromkeys(name for name in faults if name != "none"))
        if unknown := [name for name in wanted if name not in FAULTS]:
            raise ValueError(f"no such fault as {', '.join(unknown)}: {', '.join(FAULTS)} or none")
        return wanted

    @field_validator("reference")
    @classmethod
    def _can_be_read(cls, reference: str | None) -> str | None:
        if (
            reference in (None, TRANSFORMERS)
            or re.match(URL, reference)
            or Path(reference).is_file()
        ):
            return reference
        raise ValueError(f"neither {TRANSFORMERS}, nor a URL, nor a file: {reference}")

    @field_validator("report")
    @classmethod
    def _can_be_written(cls, path: Path | None) -> Path | None:
        return None if path is None else writable(path, _REPORTS)


class VerifyArguments(NamedTuple):
    """The parsed command line."""

    options: VerifyOptions
    serve: ServeSettings
    arguments: list[str]  # of `serve`, for the server that is started

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """Parse the command line. Wrong settings end the process with status 2."""
        own, rest = split(arguments)
        options = load(VerifyOptions, own)
        serve = or_exit(VerifyOptions, lambda: _one_model(ServeSettings.of_flags(rest)))
        if options.url is not None:
            or_exit(VerifyOptions, lambda: _refuse_settings(rest))
        if options.url is None and _adds_drafts(serve):
            rest = [*rest, *_DRAFTS]
        return cls(options, serve, rest)

    def run(self, console: Console) -> int:
        """Return the exit status. Raise SurestepError where libraries are missing."""
        try:
            from .command import verify
        except ImportError as error:
            raise SurestepError(f"`verify` needs {error.name}: pip install surestep") from error
        return verify(self, console)

    @property
    def adds_tools(self) -> bool:
        """Return whether a parser is added, without which no tool is called."""
        return self.options.url is None and self.serve.tool_call_parser is None

    @property
    def may_be_shortened(self) -> bool:
        """Return whether the flags leave open how long sequences may be."""
        given = "max_model_len" in self.serve.model_fields_set
        return self.options.url is None and not given

    @property
    def adds_drafts(self) -> bool:
        """Return whether drafts are added because speculation is turned off."""
        return self.options.url is None and _adds_drafts(self.serve)


def _one_model(serve: ServeSettings) -> ServeSettings:
    """Return the settings. Raise SettingsError where they are those of several models."""
    if serve.models:
        raise SettingsError("one model at a time is verified; or --url URL NAME of a server")
    return serve


def _adds_drafts(serve: ServeSettings) -> bool:
    return serve.speculative_config == {}


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of VerifyOptions and, unchanged, all other words."""
    own: list[str] = []
    rest: list[str] = []
    switches, flags = _own_flags()
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        flag = name.replace("_", "-")
        if flag in flags:
            own.append(flag + word[len(name) :])
            own += [] if equals else itertools.islice(words, 1)
        elif flag in switches:
            own.append(flag + word[len(name) :])
        else:
            rest.append(word)
    return own, rest


def verify_help() -> str:
    width = max(shutil.get_terminal_size().columns, 60)
    names = VerifyOptions.model_fields.keys() - Settings.model_fields.keys()
    fields = {n: f for n, f in VerifyOptions.model_fields.items() if n in names}
    lines = [entry(*declared(field.alias or name, field), width) for name, field in fields.items()]
    return "".join([_INTRODUCTION, *lines, _MORE])


def _own_flags() -> tuple[set[str], set[str]]:
    """Return the switches, and the flags with a value."""
    switches: set[str] = set()
    flags: set[str] = set()
    for name, field in VerifyOptions.model_fields.items():
        if name not in Settings.model_fields:
            known = switches if field.annotation is bool else flags
            known.add(f"--{(field.alias or name).replace('_', '-')}")
    return switches, flags


def _refuse_settings(rest: Sequence[str]) -> None:
    asked = FlagReader(ServeSettings.model_fields)
    asked.read_arguments(rest)
    given = [*asked.values.keys() - _WITH_URL, *(n.lstrip("-") for n in asked.without_effect)]
    if given:
        names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in given))
        raise SettingsError(f"{names}: not with --url, where a server runs already")
