from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from surestep_common.tracing import NO_SPAN, Tracer, TraceSettings, open_tracer


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:4317", "http://localhost:4317"),
        ("http://collector:4317", "http://collector:4317"),
        ("grpc://collector:4317/", "grpc://collector:4317/"),
        ("https://[::1]:4317", "https://[::1]:4317"),
    ],
)
def test_endpoints(given: str, url: str) -> None:
    assert TraceSettings(otlp_traces_endpoint=given).otlp_traces_endpoint == url
    assert TraceSettings(otlp_traces_endpoint=url).otlp_traces_endpoint == url


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("http://collector:4318/v1/traces", "gRPC"),
        ("collector", "host:port"),
        ("ftp://collector:4317", "host:port"),
        ("http://:4317", "host:port"),
        ("http://collector:x", "Port"),
        ("", "host:port"),
    ],
)
def test_endpoints_that_cannot_be_are_refused(given: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TraceSettings(otlp_traces_endpoint=given)


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ValidationError, match="gRPC"):
        TraceSettings(otlp_traces_endpoint="collector:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    TraceSettings(otlp_traces_endpoint="collector:4317")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ValidationError, match=r"surestep\[traces\]"):
        TraceSettings(otlp_traces_endpoint="collector:4317")


async def test_without_an_endpoint_spans_are_nothing() -> None:
    tracer = open_tracer(TraceSettings(), "test")
    assert type(tracer) is Tracer
    with tracer.begin("a", [("traceparent", "x")]) as span, span.child("b", after=span) as part:
        part.set({"a": 1})
        part.fail("error")
        assert (part, part.headers, part.sent) == (NO_SPAN, (), False)
    await tracer.close()


def test_nothing_of_opentelemetry_is_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys, surestep_gateway.server, surestep_scheduler.server;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
