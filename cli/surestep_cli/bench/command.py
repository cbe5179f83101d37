"""`surestep bench`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, FilePath, field_validator
from pydantic_settings import CliImplicitFlag
from rich.console import Console

from surestep_cli.api.http import ServerUrl
from surestep_cli.terminal.output import writable


class Bench(ServerUrl):
    """Send requests to a running server and report throughput and latencies."""

    model: str | None = Field(
        default=None, description="name of the model; none = the server's first"
    )
    concurrency: int = Field(default=8, ge=1, description="requests open at once")
    num_requests: int = Field(default=32, ge=1, description="requests in all")
    num_warmup: int | None = Field(
        default=None,
        ge=0,
        description="requests sent first and not counted; default: one for each open at once",
    )
    max_tokens: int = Field(default=128, ge=1, description="tokens generated per request")
    prompt_tokens: int = Field(
        default=64, ge=1, description="length of the prompts, about, in tokens"
    )
    prompts: FilePath | None = Field(
        default=None,
        description="prompts, one a line; in a .jsonl file bodies of OpenAI requests",
    )
    drafters: list[str | dict[str, Any]] = Field(
        default_factory=list,
        description="compare values of --speculative-config, e.g. auto,ngram, on a server of each",
    )
    serve: str = Field(
        default="", description='those servers\' model and flags, e.g. "MODEL --max-num-seqs 32"'
    )
    prompt_kind: str = Field(
        default="random", pattern="^(random|repeat)$", description="random, or repeat: drafts well"
    )
    ready_check_timeout_sec: float = Field(
        default=0.0, ge=0, description="seconds to wait for a server that is not ready"
    )
    seed: int = Field(default=0, description="another seed = other prompts")
    extra: dict[str, object] = Field(
        default_factory=dict,
        description="JSON merged into every request body; null leaves a field out",
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

    @property
    def warmup(self) -> int:
        """Requests that are sent first."""
        return self.concurrency if self.num_warmup is None else self.num_warmup

    def run(self, console: Console) -> int:
        """Return the exit status: 0 when no request failed."""
        if self.drafters:
            from .drafters import compare

            return compare(self, console)
        from .bench import bench

        return bench(self, console)
