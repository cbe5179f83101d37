"""`surestep status` and `surestep top`: their flags."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import CliImplicitFlag
from rich.console import Console
from surestep_common.errors import SurestepError

from surestep_cli.api.http import ServerUrl
from surestep_cli.terminal.output import report_console


class Status(ServerUrl):
    """List gateway, scheduler, supervisors and ranks of a running server."""

    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print the server's answer as JSON"
    )

    def run(self, console: Console) -> int:
        """Return the exit status: 0 when everything serves, 1 when not."""
        from .status import show

        return show(self.url, self.key(), as_json=self.json_output, console=report_console())


class Top(ServerUrl):
    """Watch a running server: a live view in a terminal, a line for each look elsewhere."""

    interval_s: float = Field(default=1.0, gt=0, description="seconds between two looks")
    updates: int | None = Field(default=None, ge=1, description="looks; none = until Ctrl-C")

    def run(self, console: Console) -> int:
        try:
            from .top import top
        except ImportError as error:
            raise SurestepError(
                f"`surestep top` needs {error.name}: pip install surestep"
            ) from error
        return top(
            self.url,
            self.key(),
            interval_s=self.interval_s,
            updates=self.updates,
            console=report_console(),
        )
