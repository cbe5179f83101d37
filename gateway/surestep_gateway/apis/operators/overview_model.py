"""GET /overview: the content of the status page, as typed objects.

Every list in it has a bound, and so has every text.
"""

from __future__ import annotations

from pydantic import BaseModel
from surestep_proto.scheduler_pb2 import AdapterLoad, DraftingValue, SchedulerInfo, SchedulerStats

from surestep_gateway.observability.clients import ClientsView
from surestep_gateway.observability.step_metrics import drafted_at
from surestep_gateway.schedulers.history import HistoryView, OutageView

from .overview_engine import EngineView, Line


class GatewayView(BaseModel):
    """This process."""

    pid: int
    address: str
    state: str  # SERVING, WAITING_FOR_SCHEDULER, DRAINING
    version: str
    models: list[str]  # names that requests may carry
    open_requests: int


class ModelView(BaseModel):
    """The model that a scheduler serves."""

    path: Line
    fingerprint: str
    dtype: str
    device: str
    max_model_len: int  # tokens
    max_num_seqs: int
    drafter: str  # empty: no speculation
    max_draft_tokens: int
    speculative_config: str  # how drafts are made, JSON; empty: none are
    drafts_because: Line  # why they are made like this; empty: it was asked for
    drafter_fault: Line  # why there is none although it was asked for; empty otherwise
    headless: bool  # it writes no text

    @classmethod
    def of(cls, info: SchedulerInfo) -> ModelView:
        return cls(
            path=info.model_path,
            fingerprint=info.model_fingerprint,
            dtype=info.dtype,
            device=info.device,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            drafter=info.drafter,
            max_draft_tokens=info.max_draft_tokens,
            speculative_config=info.speculative_config,
            drafts_because=info.drafts_because,
            drafter_fault=info.drafter_fault,
            headless=info.headless,
        )


class DraftingView(BaseModel):
    """Value of drafts of a source to steps of about the same size."""

    source: str  # "proposed" by a drafter, or "looked_up"
    rows: int  # that decode, at most
    value: float  # tokens per second as a multiple of those without drafts
    drafts: bool  # steps draft
    time_factor: float  # time that drafts add, as a multiple of what is computed
    trials: int

    @classmethod
    def of(cls, size: DraftingValue) -> DraftingView:
        return cls(
            source=size.source,
            rows=size.rows,
            value=size.value,
            drafts=size.drafts,
            time_factor=size.time_factor,
            trials=size.num_trials,
        )


class AdapterView(BaseModel):
    """An adapter in the pool of the workers."""

    name: str
    running: int  # requests
    waiting: int
    leaving: bool  # it was given up, and only open requests have it

    @classmethod
    def of(cls, load: AdapterLoad) -> AdapterView:
        return cls(
            name=load.name,
            running=load.num_running,
            waiting=load.num_waiting,
            leaving=load.leaving,
        )


class FiguresView(BaseModel):
    """Counters since the start of the scheduler's process, and gauges."""

    prompt_tokens: int
    output_tokens: int
    steps: int
    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_cached: int
    step_p50_s: float
    step_p99_s: float
    lost_epochs: int
    windows: int  # with drafts, that were verified
    drafts: int
    accepted: int
    drafted_at: list[int]  # windows with a draft at the position
    accepted_at: list[int]  # those in which it was accepted
    windows_by_accepted: list[int]  # index = drafts accepted
    speculation_suspended: bool
    drafting: list[DraftingView]
    adapters: list[AdapterView]

    @classmethod
    def of(cls, stats: SchedulerStats) -> FiguresView:
        return cls(
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.generation_tokens,
            steps=stats.num_steps,
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_blocks=stats.num_blocks_total,
            kv_blocks_used=stats.num_blocks_used,
            kv_blocks_cached=stats.num_blocks_cached,
            step_p50_s=stats.step_time_p50_s,
            step_p99_s=stats.step_time_p99_s,
            lost_epochs=sum(stats.num_incidents.values()),
            windows=stats.num_drafts,
            drafts=stats.num_draft_tokens,
            accepted=stats.num_accepted_tokens,
            drafted_at=drafted_at(stats.steps),
            accepted_at=list(stats.num_accepted_tokens_per_pos),
            windows_by_accepted=list(stats.steps.num_windows_by_accepted),
            speculation_suspended=stats.speculation_suspended,
            drafting=[DraftingView.of(size) for size in stats.drafting],
            adapters=[AdapterView.of(load) for load in stats.adapters],
        )


class SchedulerView(BaseModel):
    """Scheduler, as seen by the gateway and as it reports itself."""

    address: str
    serves: str  # name of the model
    residence: str  # of that model: loaded, loading, sleeping, unloaded, failed
    comes_and_goes: bool  # requests wake that model
    admits: bool  # requests are sent to it
    circuit_breaker: str
    trouble: Line  # why it does not serve; empty while it does
    model: ModelView | None  # None: it has never served
    engine: EngineView | None  # None: it does not answer
    figures: FiguresView  # of its last reply
    history: HistoryView
    outages: list[OutageView]  # newest first


class Overview(BaseModel):
    """The whole document at one moment, to which all ages refer."""

    gateway: GatewayView
    clients: ClientsView
    schedulers: list[SchedulerView]
