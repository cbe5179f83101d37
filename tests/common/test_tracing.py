from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from pydantic import ValidationError
from support.processes.trace_collector import collecting
from surestep_common.errors import InvalidRequest
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
        ("http://user:secret@collector:4317", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("", "host:port"),
    ],
)
def test_endpoints_that_cannot_be_are_refused(given: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TraceSettings(otlp_traces_endpoint=given)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("https://host/otlp/v1/traces?a=b", "https://host/otlp/v1/traces?a=b"),
    ],
)
def test_endpoints_over_http(monkeypatch: pytest.MonkeyPatch, given: str, url: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert TraceSettings(otlp_traces_endpoint=given).otlp_traces_endpoint == url
    with pytest.raises(ValidationError, match="must be http"):
        TraceSettings(otlp_traces_endpoint="grpc://collector:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")  # goes before the other
    TraceSettings(otlp_traces_endpoint="grpc://collector:4317")


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ValidationError, match="'http/json', not grpc or http/protobuf"):
        TraceSettings(otlp_traces_endpoint="collector:4317")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
    ],
)
def test_variables_with_wrong_values_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest, match="a variable of OpenTelemetry"):
        open_tracer(TraceSettings(otlp_traces_endpoint="collector:4317"), "test")


async def test_what_an_error_says_costs_no_other_span() -> None:
    with collecting() as collector:
        tracer = open_tracer(TraceSettings(otlp_traces_endpoint=collector.endpoint), "test")
        for message in ("half a pair \ud83d", "x" * 100_000, "fine"):
            with contextlib.suppress(RuntimeError), tracer.begin(message[:4], ()):
                raise RuntimeError(message)
        await tracer.close()
    assert [span.name for span in collector.spans] == ["half", "xxxx", "fine"]
    assert [span.failed for span in collector.spans] == [True] * 3
    assert [len(span.message) for span in collector.spans] == [13, 512, 4]


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
