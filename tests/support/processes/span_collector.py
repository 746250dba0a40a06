"""A collector of OpenTelemetry spans over HTTP, which keeps what it gets."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from processes.loopback_server import loopback_server

DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span as it came."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    """Its parent's id; empty where it has none."""
    begin: int
    """Nanoseconds of wall time."""
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: tuple[str, ...]
    is_error: bool

    @classmethod
    def of(cls, span: Span, resource: Resource) -> "ReceivedSpan":
        """Read from OpenTelemetry's message."""
        of_resource = {one.key: _plain(one.value) for one in resource.attributes}
        return cls(
            service=of_resource["service.name"],
            name=span.name,
            trace=span.trace_id.hex(),
            span=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            begin=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            attributes={one.key: _plain(one.value) for one in span.attributes},
            resource=of_resource,
            events=tuple(event.name for event in span.events),
            is_error=span.status.code == Status.STATUS_CODE_ERROR,
        )


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None, "an attribute without a value"
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind)


@dataclass
class SpanCollector:
    """Keeps what is sent to it."""

    url: str
    bodies: list[bytes] = field(default_factory=list)

    def all_spans(self) -> list[ReceivedSpan]:
        """Every span that came, in the order of their beginnings."""
        found = [
            ReceivedSpan.of(span, resource.resource)
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return sorted(found, key=lambda span: span.begin)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace."""
        return [span for span in self.all_spans() if span.trace == trace_id]

    def spans(self) -> dict[str, dict[str, str]]:
        """The gateway's span of each request by trace id: name, ids and attributes, all as text."""
        return {
            span.trace: {"span": span.span, "parent": span.parent, "name": span.name}
            | {name: str(value) for name, value in span.attributes.items()}
            for span in self.all_spans()
            if span.name.startswith("POST ")
        }

    def wait_for(self, num_spans: int) -> None:
        """Until so many came: what sends them may end before they are here, as it waits for that only shortly."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(came := self.all_spans()) < num_spans:
            assert time.monotonic() < deadline, f"{len(came)} of {num_spans} spans: {came}"
            time.sleep(0.01)

    def runs(self, trace_id: str) -> list[ReceivedSpan]:
        """The gateway's runs on engines within one trace."""
        return [span for span in self.trace(trace_id) if span.name == "gateway.run"]


@contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """One that listens until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            kept.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with loopback_server(Handler) as url:
        kept = SpanCollector(url)
        yield kept
