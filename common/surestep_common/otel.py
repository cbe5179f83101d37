"""Spans of OpenTelemetry; imported only where there is a collector to send them to.

The SDK's batch processor sends them from a thread of its own. When the collector is away its queue
fills, and further spans are dropped: requests never wait, and never fail for it. Its variables
(OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_..., the protocol,
headers and certificates of OTEL_EXPORTER_OTLP_...) hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .config import traces_protocol
from .errors import InvalidRequest
from .tracing import OVER_HTTP, TLS_SCHEMES, Headers, Span, SpanKind, Tracer, Value

_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}
_W3C = TraceContextTextMapPropagator()
_CLOSE_S = 2.0
_LONGEST_HEADER = 512  # characters; W3C wants as much to be passed on
_LONGEST_MESSAGE = 512  # characters, of an error


class OtelSpan(Span):
    """A span that is sent when it ends."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, kind: SpanKind) -> None:
        self._tracer, self._span, self.kind = tracer, span, kind
        self.sent = span.is_recording()

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(self._span))
        return tuple(carrier.items())

    def child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        attributes: Mapping[str, Value] | None = None,
        after: Span | None = None,
        began_ns: int | None = None,
    ) -> Span:
        links = [trace.Link(after._span.get_span_context())] if isinstance(after, OtelSpan) else []
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            _KINDS[kind],
            attributes,
            links,
            began_ns,
        )
        return OtelSpan(self._tracer, span, kind)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def fail(self, error: str, message: str = "") -> None:
        self._span.set_attribute("error.type", error)
        # A character that is none would cost all the spans that are sent together with this one.
        text = message[:_LONGEST_MESSAGE].encode(errors="replace").decode()
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, text or None))

    def end(self, at_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(at_ns)


def _exporter(endpoint: str) -> SpanExporter:
    if traces_protocol() == OVER_HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcSpanExporter,
    )

    parts = urlsplit(endpoint)
    return GrpcSpanExporter(
        endpoint=f"{'https' if parts.scheme in TLS_SCHEMES else 'http'}://{parts.netloc}",
        insecure=parts.scheme not in TLS_SCHEMES,
    )


class OtelTracer(Tracer):
    """Sends spans to a collector."""

    def __init__(self, endpoint: str, service: str) -> None:
        """`endpoint` is a URL of OTLP; OTEL_SERVICE_NAME goes before `service`.

        Raises InvalidRequest where a variable of OpenTelemetry has a value that it cannot have.
        """
        try:
            exporter = _exporter(endpoint)
            processor = BatchSpanProcessor(exporter)
        except Exception as error:  # the SDK has no class of its own for them
            raise InvalidRequest(f"a variable of OpenTelemetry (OTEL_...): {error}") from error
        facts: dict[str, Value] = {"service.name": service, "process.pid": os.getpid()}
        self._provider = TracerProvider(
            resource=Resource(facts).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("surestep")

    def begin(
        self,
        name: str,
        headers: Headers,
        *,
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        # What is passed on travels as metadata of a call, which has no room for more than this.
        carrier = {k: v for k, v in headers if isinstance(v, str) and len(v) <= _LONGEST_HEADER}
        span = self._tracer.start_span(
            name, _W3C.extract(carrier), trace.SpanKind.SERVER, attributes
        )
        return OtelSpan(self._tracer, span, SpanKind.SERVER)

    async def close(self) -> None:
        """Send what is left; the thread is left behind where the collector does not answer."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the caller waits no more
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=close, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await closed.wait()
