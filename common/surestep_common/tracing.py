"""Traces of requests: spans that are sent to a collector in the background, or nowhere.

Without `--otlp-traces-endpoint` nothing of OpenTelemetry is imported (see otel.py): every span is a
`Span`, which does nothing. Callers need not know which kind they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from importlib.util import find_spec
from types import TracebackType
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from .config import Settings, traces_protocol
from .errors import kind_of

Value = str | bool | int | float | Sequence[str]
Headers = Iterable[tuple[str, str | bytes]]

TLS_SCHEMES = ("https", "grpcs")
OVER_HTTP = "http/protobuf"
_PROTOCOLS = {  # and the packages that they need
    "grpc": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"),
    OVER_HTTP: ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
SERVER_FAULT = 500  # the statuses of HTTP from here on


def _endpoint(url: str) -> str:
    """Check a URL that spans can be sent to. Raises ValueError."""
    url, protocol = url if "://" in url else f"http://{url}", traces_protocol()
    if protocol not in _PROTOCOLS:
        known = " or ".join(_PROTOCOLS)
        raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}, not {known}")
    parts = urlsplit(url)
    if parts.username is not None:
        raise ValueError("keys belong into OTEL_EXPORTER_OTLP_HEADERS, where no log shows them")
    url = _http_url(url) if protocol == OVER_HTTP else _grpc_url(url)
    if not all(map(_installed, _PROTOCOLS[protocol])):
        raise ValueError("needs OpenTelemetry: pip install 'surestep[traces]'")
    return url


def _grpc_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "grpc", *TLS_SCHEMES) or not parts.hostname or not parts.port:
        raise ValueError("must be host:port, http://host:port or https://host:port")
    if parts.path.strip("/"):
        raise ValueError(
            "spans are sent by OTLP over gRPC (usually port 4317), not over HTTP, unless "
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {OVER_HTTP}"
        )
    return url


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://host:port/path or https://host:port/path")
    return url if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # what it is part of is not there either
        return False


class TraceSettings(Settings):
    """Settings of a process that handles requests."""

    otlp_traces_endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(
        default=None,
        description="OpenTelemetry collector for spans, e.g. http://localhost:4317 (OTLP over "
        "gRPC, or by OTEL_EXPORTER_OTLP_TRACES_PROTOCOL); none = no spans",
    )


class SpanKind(Enum):
    """On which side of a call a span is."""

    INTERNAL = 0
    SERVER = 1
    CLIENT = 2


class Span:
    """A span that is not sent, and the interface of those that are. Times are time.time_ns()."""

    sent: bool = False  # it goes to a collector, so that its attributes are worth computing
    kind = SpanKind.INTERNAL

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers that carry it to the callee: traceparent and tracestate (W3C)."""
        return ()

    def child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        attributes: Mapping[str, Value] | None = None,
        after: Span | None = None,
        began_ns: int | None = None,
    ) -> Span:
        """Begin a part of this span. With `after`, a link to what it is another attempt at."""
        return self

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""

    def fail(self, error: str, message: str = "") -> None:
        """Mark it as failed for a reason of this kind."""

    def end(self, at_ns: int | None = None) -> None:
        """End it; a second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):  # others: it was cancelled, or closed
            self.fail_by(error)
        self.end()

    def fail_by(self, error: Exception) -> None:
        """Mark it as failed by an error; a server's has not where the request itself was wrong."""
        if self.kind is not SpanKind.SERVER or kind_of(error).http_status >= SERVER_FAULT:
            self.fail(type(error).__name__, str(error))


class Tracer:
    """Makes the first span of a process for a request; this one's spans are not sent."""

    def begin(
        self,
        name: str,
        headers: Headers,
        *,
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        """Begin a span of kind SERVER, part of the caller's if the headers of its call say so."""
        return NO_SPAN

    async def close(self) -> None:
        """Send what is left, for a moment."""


NO_SPAN = Span()
current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def open_tracer(settings: TraceSettings, service: str) -> Tracer:
    """Open the tracer of the settings; `service` is the name of the process in traces."""
    if settings.otlp_traces_endpoint is None:
        return Tracer()
    from .otel import OtelTracer

    return OtelTracer(settings.otlp_traces_endpoint, service)
