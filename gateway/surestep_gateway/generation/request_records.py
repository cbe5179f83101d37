"""Records of requests for operators: log lines where they are enabled, and trace spans.

Spans have OpenTelemetry's names for generative AI. Where vLLM uses another name for an attribute,
that name is set as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import orjson
from starlette.types import Scope
from surestep_common import tracing
from surestep_common.errors import Cancelled
from surestep_common.tracing import Span, Tracer, Value

from surestep_gateway.context import Gateway
from surestep_gateway.generation.generation import Generation, Origin
from surestep_gateway.request.protocol import Body, ChatBody

logger = logging.getLogger(__name__)

PROVIDER = "surestep"
_CARRIERS = (b"traceparent", b"tracestate")
# Left out of a body: texts, which are in the prompt, and the salt, which must stay secret.
_LEFT_OUT = {"messages", "prompt", "input", "tools", "documents", "cache_salt"}


def log_request(gateway: Gateway, generation: Generation) -> None:
    """Log a request that generates."""
    ids = [prompt.token_ids for prompt in generation.prompts]
    log_body(gateway, generation.id, generation.origin, generation.body, ids)


def log_body(
    gateway: Gateway,
    name: str,
    origin: Origin,
    body: Body,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Log the parameters of a request, and at DEBUG its first prompt; cut at --max-log-len."""
    if not gateway.settings.enable_log_requests:
        return
    limit = gateway.settings.max_log_len
    fields = type(body).model_fields.keys() - _LEFT_OUT
    asked = body.model_dump(mode="json", exclude_unset=True, include=fields)
    logger.info(
        "received %s from %s: prompts=%d tokens=%d %s",
        name,
        origin.caller.name,
        len(prompts),
        sum(map(len, prompts)),
        orjson.dumps(asked).decode()[:limit],
    )
    if logger.isEnabledFor(logging.DEBUG):
        ids = prompts[0][:limit]  # a token has a character or more
        text = gateway.tokenizer.decode(list(ids), skip_special_tokens=False)
        logger.debug("prompt of %s: %r", name, text[:limit])


def begin_span(tracer: Tracer, scope: Scope, headers: Mapping[bytes, bytes]) -> Span:
    """Begin the span of an HTTP request."""
    method, path, scheme = scope["method"], scope["path"], scope["scheme"]
    carrier = [(n.decode(), headers[n].decode("latin-1")) for n in _CARRIERS if n in headers]
    attributes = {
        "http.request.method": method,
        "http.route": path,
        "url.path": path,
        "url.scheme": scheme,
    }
    return tracer.begin(f"{method} {path}", carrier, attributes=attributes)


def note_status(span: Span, status: int) -> None:
    """Record the status of the response on the span."""
    span.set({"http.response.status_code": status})
    if status >= tracing.SERVER_FAULT:
        span.fail(str(status))


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Mark the span as failed if the block raises anything but a client's error."""
    try:
        yield
    except Exception as error:
        tracing.current.get().fail_by(error)
        raise


@contextlib.contextmanager
def ending(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell how the request that is served in the block ended: done, abort or error."""
    outcome = "error"
    try:
        with failures():
            yield
        outcome = "done"
    except (Cancelled, asyncio.CancelledError):
        outcome = "abort"
        raise
    finally:
        tell(outcome)


def tell_generation(generation: Generation) -> None:
    """Record the attributes of a finished generation."""
    span = tracing.current.get()
    if span.sent:
        span.set(_asked(generation) | _answered(generation))


def _asked(generation: Generation) -> dict[str, Value]:
    body, n = generation.body, generation.body.n or 1
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "chat" if isinstance(body, ChatBody) else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": generation.model,
        "gen_ai.request.id": generation.origin.request_id,
        "gen_ai.request.choice.count": n,
        "gen_ai.request.stream": bool(body.stream),
        "gen_ai.request.n": n,
    }
    resolved = generation.sequences[0].journal.resolved
    if resolved is not None:
        attributes |= {
            "gen_ai.request.temperature": resolved.temperature,
            "gen_ai.request.top_p": resolved.top_p,
            "gen_ai.request.top_k": resolved.top_k,
            "gen_ai.request.max_tokens": resolved.max_tokens,
            "gen_ai.request.presence_penalty": resolved.presence_penalty,
            "gen_ai.request.frequency_penalty": resolved.frequency_penalty,
        }
    return attributes


def _answered(generation: Generation) -> dict[str, Value]:
    usage, sequences = generation.usage, generation.sequences
    attributes: dict[str, Value] = {
        "gen_ai.response.id": generation.id,
        "gen_ai.response.model": generation.model,
        "gen_ai.response.finish_reasons": [s.finish_reason or "error" for s in sequences],
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.prompt_tokens": usage.prompt,
        "gen_ai.usage.completion_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.num_sequences": len(sequences),
        "gen_ai.latency.e2e": time.perf_counter() - generation.origin.arrived,
        "surestep.resumes": sum(sequence.journal.num_resumes for sequence in sequences),
    }
    first_token_s = sequences[0].timer.first_token_s
    if first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
        attributes["gen_ai.latency.time_to_first_token"] = first_token_s
    return attributes
