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
        description="bytes of request bodies in memory at once, less 64 KiB of each; default: "
        "1 GiB, or a quarter of the memory if that is less",
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
        description="most text processes, which prepare requests that are large or unusual or ask "
        "for a grammar",
    )
    text_memory_bytes: Size = Field(
        2 << 30, description="memory that a text process may take over a request"
    )
    timeout_keep_alive: PositiveInt = Field(
        75,
        description="seconds an idle connection stays open after a response; keep it above the "
        "idle timeout of load balancers, which is often 60",
    )
    body_timeout_s: PositiveFloat = Field(
        30.0,
        description="seconds in which a request body must arrive, and one for each 64 KiB of it",
    )
    send_timeout_s: PositiveFloat = Field(
        30.0, description="seconds a client may leave what is sent to it unread"
    )
    sse_keep_alive_interval: float = Field(
        15.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds without an event after which a stream sends a ping, and its status if "
        "that was not sent yet; 0: never",
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
        description="seconds a new request waits for a scheduler that serves; they begin anew "
        "when one that drained has ended",
    )
    drain_timeout_s: float = Field(
        60.0, ge=0, description="seconds open requests may take to finish after SIGTERM"
    )
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM in which new requests are still served, before those of "
        "--drain-timeout-s: balancers find out",
    )
