"""The commands that are a few lines each: their flags and what they do."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from importlib.resources import files
from pathlib import Path

import surestep_proto
from pydantic import Field, FilePath, SecretStr
from pydantic_settings import CliImplicitFlag, CliPositionalArg
from rich.console import Console
from surestep_common.config import Settings
from surestep_common.errors import InvalidRequest, Unavailable

from surestep_cli.api.http import URL_IS, Url, one_key
from surestep_cli.terminal.output import report_console

from .api.http import api_root, call, no_answer

_RESTART_S = 3600.0  # the server has time limits of its own, for each scheduler


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
        """Print the folder on stdout, alone on its line for use in scripts.

        Raise InvalidRequest when something other than a link is at `link`, Unavailable when the
        link cannot be written.
        """
        from .serve.hub import ModelSource
        from .serve.model_source import resolve

        source = ModelSource(self.revision)
        folder = resolve(self.model, console, source, text_only=self.text_only)
        if self.link is not None:
            _point(self.link, folder.path)
        report_console(soft_wrap=True).print(str(folder.path), markup=False)
        return 0


def _point(link: Path, target: Path) -> None:
    if link.exists() and not link.is_symlink():
        raise InvalidRequest(f"{link} exists and is no symbolic link", param="link")
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        fresh.symlink_to(target)
        fresh.replace(link)  # a reader sees the old target or the new one
    except OSError as error:
        raise Unavailable(f"cannot write the link {link}: {error.strerror}") from error


class RestartWorkers(Settings):
    """Replace the workers of a running server, one scheduler after the other; requests go on."""

    url: Url = Field(default="http://127.0.0.1:8000", description=URL_IS)
    admin_api_key: SecretStr | None = Field(
        default=None, description="the server's --admin-api-key"
    )
    admin_api_key_file: FilePath | None = Field(
        default=None, description="file that holds it, in its place"
    )
    reason: str | None = Field(default=None, description="for the server's log")

    def run(self, console: Console) -> int:
        """Print what was replaced. Return 0 when everything serves again.

        Raise InvalidRequest without a key, Unavailable.
        """
        key = one_key(self.admin_api_key, self.admin_api_key_file)
        if key is None:
            raise InvalidRequest("--admin-api-key or --admin-api-key-file is needed")
        path = f"{api_root(self.url)}/admin/workers/restart"
        reason = {"reason": self.reason} if self.reason else {}
        try:
            answer = call(path, reason, api_key=key, timeout_s=_RESTART_S)
        except OSError as error:
            raise no_answer(self.url, error) from error
        body = answer.body or {}
        out = report_console()
        for one in body.get("restarted", ()):
            replaced = f"{one['scheduler']}: {one['num_ranks']} workers replaced"
            out.print(f"{replaced}, serving again after {one['seconds']:.1f} s", markup=False)
        if answer.status != 200:
            message = body.get("error", {}).get("message", f"HTTP {answer.status}")
            raise Unavailable(f"{body.get('failed', self.url)}: {message}")
        return 0


class NewSecret(Settings):
    """Draw a secret for --grpc-secret-file, unless the file is there already."""

    file: CliPositionalArg[Path] = Field(description="file to create, for its owner's eyes only")

    def run(self, console: Console) -> int:
        """Write the file whole or not at all: several services may try at once.

        Raise Unavailable when it cannot be written.
        """
        from .serve.wiring import SECRET_BYTES

        folder, prefix = self.file.parent, f".{self.file.name}."
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=prefix) as scratch:
                scratch.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
                scratch.flush()
                with contextlib.suppress(FileExistsError):
                    os.link(scratch.name, self.file)
        except OSError as error:
            raise Unavailable(f"cannot write {self.file}: {error.strerror}") from error
        return 0


class Proto(Settings):
    """Print the protocol, for clients in other languages, or write its files into a folder."""

    folder: CliPositionalArg[Path | None] = Field(
        default=None, description="folder to write surestep_proto/*.proto into; none = stdout"
    )

    def run(self, console: Console) -> int:
        """Keep the files' places, by which they import each other. Raise Unavailable."""
        package = files(surestep_proto)
        texts = {
            f"{package.name}/{file.name}": file.read_text()
            for file in sorted(package.iterdir(), key=lambda entry: entry.name)
            if file.name.endswith(".proto")
        }
        if self.folder is None:
            out = report_console(soft_wrap=True)
            for name, text in texts.items():
                out.print(f"// {name}\n{text}", markup=False, emoji=False)
            return 0
        try:
            for name, text in texts.items():
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        except OSError as error:
            raise Unavailable(f"cannot write into {self.folder}: {error.strerror}") from error
        return 0


class CollectEnv(Settings):
    """Print versions, machine, kernels and GPUs for reports of faults; no secrets."""

    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print one JSON object"
    )

    def run(self, console: Console) -> int:
        from .environment.facts import collect, show

        show(collect(), as_json=self.json_output)
        return 0
