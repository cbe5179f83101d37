"""A collector of traces: a real OTLP service on loopback that keeps what it is sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Status

PATIENCE_S = 30.0


class Sent(NamedTuple):
    """A span, with ids in hexadecimal."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: list[str]  # span ids
    attributes: dict[str, Any]
    failed: bool
    message: str
    began_ns: int
    ended_ns: int


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans in the order in which they came."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []
        self.endpoint = ""  # for --otlp-traces-endpoint
        self.paths: list[str] = []  # that were asked for, where it speaks HTTP
        self.headers: list[dict[str, str]] = []  # of these

    def Export(self, request: Any, context: Any) -> Any:
        """What exporters call."""
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_sent(service, span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Sent]:
        """Those with this name, oldest first."""
        return sorted((s for s in self.spans if s.name == name), key=lambda span: span.began_ns)

    def until(self, condition: Callable[[Collector], bool]) -> None:
        """Wait for spans, which come in batches. Blocks: not for event loops."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self):
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.02)


def _values(attributes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        values[one.key] = value
    return values


def _sent(service: str, span: Any) -> Sent:
    return Sent(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        links=[link.span_id.hex() for link in span.links],
        attributes=_values(span.attributes),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        message=span.status.message,
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
    )


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        collector, server
    )
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def collecting_http() -> Iterator[Collector]:
    """A collector that speaks OTLP over HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.append(self.path)
            collector.headers.append(dict(self.headers.items()))
            collector.Export(pb.ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """To nobody."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
