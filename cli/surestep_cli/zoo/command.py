"""`surestep zoo`: its flags, and what it prints."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import CliImplicitFlag, CliPositionalArg
from rich.console import Console
from surestep_common.config import USAGE_ERROR
from surestep_common.errors import SurestepError

from surestep_cli.api.http import URL_IS, ServerUrl, Url
from surestep_cli.terminal.output import writable


class Zoo(ServerUrl):
    """Look for published failures of serving engines in any server of the OpenAI API."""

    server: CliPositionalArg[Url | None] = Field(
        default=None, description=f"{URL_IS}; none = --url"
    )
    model: str | None = Field(default=None, description="name of the model; none = the first")
    without: Url | None = Field(
        default=None, description="server of the same model without speculation"
    )
    case: list[str] = Field(default_factory=list, description="cases to run; none = all")
    list_cases: CliImplicitFlag[bool] = Field(
        default=False, alias="list", description="list the cases and end"
    )
    long_tokens: int = Field(
        default=1024, ge=1, description="tokens of a long answer; some failures need 12000"
    )
    patience_s: float = Field(default=300.0, gt=0, description="seconds that a case may take")
    stop_pid: int | None = Field(
        default=None, gt=1, description="process of the server here that may be stopped for 20 s"
    )
    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print one JSON object"
    )
    report: Path | None = Field(
        default=None, description="file for the findings: .json, .html, or .xml for JUnit"
    )

    @field_validator("report")
    @classmethod
    def _can_be_written(cls, path: Path | None) -> Path | None:
        return None if path is None else writable(path, (".json", ".html", ".xml"))

    def run(self, console: Console) -> int:
        """Return 0 where nothing failed, 1 where something did, 2 where nothing was looked at."""
        from .run import zoo

        try:
            return zoo(self, console)
        except SurestepError as error:
            console.print(f"surestep zoo: {error}", markup=False, soft_wrap=True)
            return USAGE_ERROR
