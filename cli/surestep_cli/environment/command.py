"""`surestep collect-env`: its flags."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import CliImplicitFlag
from rich.console import Console
from surestep_common.config import Settings


class CollectEnv(Settings):
    """Print versions, machine, kernels and GPUs for reports of faults; no secrets."""

    json_output: CliImplicitFlag[bool] = Field(
        default=False, alias="json", description="print one JSON object"
    )

    def run(self, console: Console) -> int:
        from .facts import collect, show

        show(collect(), as_json=self.json_output)
        return 0
