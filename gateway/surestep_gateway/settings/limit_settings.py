"""Settings that bound what a client may cost, and how long anything may take."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt
from surestep_common.access import PeerSettings
from surestep_common.config import Size


class LimitSettings(PeerSettings):
    """Each field is a flag, a `SURESTEP_*` variable and a key of the config file."""

    max_logprobs: int = Field(20, ge=0, description="alternatives a request may ask for per token")
    max_n: PositiveInt = Field(128, description="sequences a request may ask for per prompt")
    max_body_bytes: Size = Field(32 << 20, description="largest request body")
    max_total_body_bytes: Size | None = Field(
        None,
        description="bytes of request bodies in memory, less 64 KiB of each; default: 1 GiB, at "
        "most a quarter of the memory",
    )
    max_answer_bytes: Size = Field(256 << 20, description="largest answer that is no stream, about")
    max_connections: PositiveInt = Field(
        1 << 14, description="open connections; fewer where there are not as many descriptors"
    )
    max_concurrent_requests: PositiveInt = Field(
        1024, description="generation requests open at once; more are answered with 429"
    )
    text_processes: PositiveInt = Field(
        4,
        description="most processes that prepare large requests, unusual ones and grammars",
    )
    text_memory_bytes: Size = Field(
        2 << 30, description="memory that a text process may take over a request"
    )
    timeout_keep_alive: PositiveInt = Field(
        75,
        description="seconds an idle connection stays open; keep it above the load "
        "balancer's, often 60",
    )
    body_timeout_s: PositiveFloat = Field(
        30.0,
        description="seconds in which a request body must arrive; see --min-body-rate",
    )
    send_timeout_s: PositiveFloat = Field(
        30.0, description="seconds a client may leave what is sent to it unread"
    )
    sse_keep_alive_interval: float = Field(
        15.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds of silence after which a stream sends a ping; 0: never",
    )
    request_timeout_s: PositiveFloat = Field(
        600.0, description="seconds a request may take as a whole"
    )
    first_token_timeout_s: PositiveFloat = Field(
        300.0, description="seconds until the first token of a sequence"
    )
    inter_token_timeout_s: PositiveFloat = Field(
        60.0, description="seconds between two tokens of a sequence"
    )
    resume_timeout_s: PositiveFloat = Field(
        60.0, description="seconds to wait for a lost scheduler before open requests fail"
    )
    admission_timeout_s: float = Field(
        30.0,
        ge=0,
        description="seconds a new request waits for a scheduler; they begin anew when a "
        "drain has ended",
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="seconds for open requests on SIGTERM")
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM in which new requests are still served, before "
        "--drain-timeout-s begins",
    )
