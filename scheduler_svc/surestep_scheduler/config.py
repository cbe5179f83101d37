"""Settings of the scheduler process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import SettingsConfigDict
from surestep_common import addresses
from surestep_common.access import PeerSettings
from surestep_common.config import Count, Names, Secrets
from surestep_common.errors import InvalidRequest
from surestep_common.tracing import TraceSettings
from surestep_proto import worker_pb2

if TYPE_CHECKING:
    from .core.limits import Limits


_ENDPOINT = r"^(tcp://.+:\d+|ipc://.+)$"


def _module(text: str) -> tuple[str, str]:
    """Parse an adapter: name=folder, or vLLM's JSON, whose folder becomes absolute. Raises
    ValueError."""
    if text.startswith("{"):
        given = json.loads(text)
        name, path = given.get("name"), given.get("path")
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path) or "=" in name:
        raise ValueError(f"takes name=folder, got {text!r}")
    return name, str(Path(path).absolute())


class KVEventsConfig(BaseModel, extra="forbid", frozen=True):
    """vLLM's configuration of KV events."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None  # None: zmq where events are enabled
    endpoint: str = Field(default="tcp://*:5557", pattern=_ENDPOINT)
    replay_endpoint: str | None = Field(default=None, pattern=_ENDPOINT)
    buffer_steps: NonNegativeInt = 10_000  # batches that may be asked for again
    hwm: NonNegativeInt = 100_000  # of the socket; 0 = any number
    max_queue_size: PositiveInt = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Return whether anything is told to anybody."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Return whether subscribers connect here, as with any address of this machine."""
        return any(part in self.endpoint for part in ("*", "::", "//0.0.0.0:", "ipc:"))


class SchedulerSettings(PeerSettings, TraceSettings):
    """Every field is also an environment variable, e.g. SURESTEP_MAX_NUM_SEQS."""

    model_config = SettingsConfigDict(cli_prog_name="surestep-scheduler")

    scheduler_listen: str = Field(
        default="127.0.0.1:50051",
        pattern=addresses.PATTERN,
        description="host:port, or unix:/path, to serve on",
    )
    grpc_api_key: Secrets = Field(
        default=(),
        description="keys, comma separated, that let gRPC clients call Generate, Info and "
        "vllm.grpc.engine",
    )
    vllm_grpc_public: bool = Field(
        default=False,
        description="let anybody call vllm.grpc.engine on that port: routers like SMG send no key",
    )
    served_model_name: Names = Field(
        default=(),
        description="names clients may use, comma separated; vllm.grpc.engine reports one",
    )
    worker_addresses: list[str] = Field(
        default=[],
        description="host:port, or unix:/path, of each rank; empty = as the supervisors say",
    )
    supervisor_addresses: list[str] = Field(
        default=[],
        description="the same of each rank's supervisor; empty = ranks are not restarted",
    )
    max_num_batched_tokens: Count = Field(
        default=2048, ge=2, description="tokens of one step, drafts included"
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, description="requests that run at once; default: the workers' slots"
    )
    max_queue_len: int = Field(default=1024, ge=0, description="requests that may wait")
    max_queue_tokens: Count = Field(
        default=1 << 20, ge=0, description="tokens of requests that may wait; 0 = any number"
    )
    enable_prefix_caching: bool = Field(
        default=True, description="share KV blocks of equal prefixes"
    )
    share_prefix_cache_between_keys: bool = Field(
        default=False,
        description="let all keys share the prefix cache; each can then learn how others' "
        "prompts begin",
    )
    adaptive_draft_length: bool = Field(
        default=True, description="draft only what raises tokens per second; else always the most"
    )
    pipeline_depth: int = Field(
        default=1, ge=0, le=2, description="plans sent ahead of the newest result"
    )
    lora_modules: Names = Field(
        default=(),
        description='adapters to load at the start: name=folder, or {"name":..,"path":..}',
    )
    lora_folder: str = Field(
        default="",
        description="folder, where workers run, whose folders are adapters: a request that names "
        "one loads it, in place of the idle one that was asked for longest ago",
    )
    kv_events_config: dict[str, Any] | None = Field(
        default=None,
        description="JSON: publish KV events for routers over ZeroMQ, as vLLM does",
    )
    step_deadline_floor_s: float = Field(
        default=3.0,
        gt=0,
        description="least seconds before a step of busy workers is given up; half on cores of "
        "their own, a sixth at rest",
    )
    step_deadline_ceiling_s: float = Field(
        default=30.0, gt=0, description="seconds after which every step is given up"
    )
    step_warmup_s: float = Field(
        default=60.0,
        gt=0,
        description="seconds before a step of a new kind is given up",
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="seconds for open requests on SIGTERM"
    )

    @model_validator(mode="after")
    def _someone_to_talk_to(self) -> SchedulerSettings:
        if not self.worker_addresses and not self.supervisor_addresses:
            raise ValueError("worker_addresses or supervisor_addresses must be given")
        return self

    @model_validator(mode="after")
    def _guests_need_a_door(self) -> SchedulerSettings:
        if self.grpc_api_key and self.read_grpc_secret() is None:
            raise ValueError("--grpc-api-key needs --grpc-secret or --grpc-secret-file")
        return self

    @field_validator("lora_modules")
    @classmethod
    def _modules_are_folders(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("=".join(_module(text)) for text in modules)

    @field_validator("lora_folder")
    @classmethod
    def _folder_is_absolute(cls, folder: str) -> str:
        return str(Path(folder).absolute()) if folder else ""

    @field_validator("kv_events_config")
    @classmethod
    def _events_are_vllms(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if given and given.get("publisher") == "zmq" and not given.get("enable_kv_cache_events"):
            raise ValueError("publisher zmq needs enable_kv_cache_events")
        try:
            return KVEventsConfig(**given).model_dump() if given else None
        except ValidationError as error:
            (name, *_), why = (first := error.errors()[0])["loc"], first["msg"]
            raise ValueError(f"{name}: {why}") from error

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Return how KV events are published, if they are."""
        config = KVEventsConfig(**self.kv_events_config or {})
        return config if config.publishes else None

    @property
    def adapters(self) -> dict[str, str]:
        """Return the folders of adapters to load at the start, by name."""
        return dict(_module(text) for text in self.lora_modules)

    def _check_tiers(self, info: worker_pb2.WorkerInfo) -> None:
        """Raise InvalidRequest where tiers behind the KV blocks could not be used."""
        needed = "" if self.enable_prefix_caching else "--enable-prefix-caching"
        if info.recurrent and not info.num_snapshots:
            needed = needed or "--snapshot-memory"
        if info.tiers and needed:
            message = f"tiers behind the KV blocks need {needed}"
            raise InvalidRequest(message, param=needed[2:].replace("-", "_"))

    def limits(self, info: worker_pb2.WorkerInfo) -> Limits:
        """Fit the settings into the workers' sizes. Raises InvalidRequest where they do not."""
        from surestep_common.kv_groups import ALL

        from .core.limits import Limits
        from .speculation.draft_length import StepCosts  # numpy, which settings alone do not need

        self._check_tiers(info)
        tokens = min(self.max_num_batched_tokens, info.max_step_tokens)
        chunk = max(1, info.prompt_chunk)
        slots = min(info.num_slots, max(1, tokens - chunk))
        if self.max_num_seqs is not None:
            slots = min(info.num_slots, self.max_num_seqs)
        return Limits(
            num_slots=slots,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            kv_windows=tuple(info.kv_windows) or (ALL,),
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_num_batched_tokens=tokens,
            max_draft_tokens=info.max_draft_tokens,
            max_forced_drafts=info.max_forced_drafts,
            grammar_fault=info.grammar_fault,
            max_queue_len=self.max_queue_len,
            max_queue_tokens=self.max_queue_tokens,
            pipeline_depth=self.pipeline_depth,
            drafter_has_state=info.drafter_has_state,
            drafter_looks_up=info.drafter_looks_up,
            drafter_recurrent=info.drafter_recurrent,
            recurrent=info.recurrent,
            num_snapshots=info.num_snapshots,
            prompt_chunk=chunk,
            adaptive_draft_length=self.adaptive_draft_length,
            costs=StepCosts.measured(
                (info.costs.tokens, info.costs.step_us),
                (info.costs.draft_rows, info.costs.draft_us),
                info.costs.us_per_context_token,
                max_tokens=tokens,
                at_once=info.costs.drafts_at_once,
            ),
            enable_prefix_caching=self.enable_prefix_caching,
            tiers=tuple(info.tiers),
            headless=info.headless,
        )
