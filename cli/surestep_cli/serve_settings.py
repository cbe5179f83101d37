"""Settings of `surestep serve`: those of all services, and the launcher's own."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict
from surestep_gateway.config import GatewaySettings
from surestep_scheduler.config import SchedulerSettings
from surestep_worker.config import WorkerSettings


class ServeSettings(WorkerSettings, GatewaySettings, SchedulerSettings):  # type: ignore[misc]
    """Every setting of the system; the one place that knows all keys of the config file.

    Where services share a field, the first base describes it (hence the remark for mypy: the
    scheduler may be given no `max_num_seqs`).
    """

    model_config = SettingsConfigDict(extra="forbid", cli_prog_name="surestep serve")

    model: CliPositionalArg[str | None] = Field(  # type: ignore[assignment]  # services: a folder
        None, description="folder in Hugging Face format or hub id; none = the default model"
    )
    log_dir: Path | None = Field(
        default=None,
        description="folder for the services' logs; none = a new one in the state folder",
    )
    startup_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds until the model must be ready"
    )

    @model_validator(mode="after")
    def _someone_to_talk_to(self) -> ServeSettings:
        """The scheduler's own check; the launcher tells it whom to talk to."""
        return self

    @model_validator(mode="after")
    def _guests_need_a_door(self) -> ServeSettings:
        """The launcher draws a secret where none is given."""
        return self
