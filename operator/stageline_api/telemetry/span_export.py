"""Exports spans of the gateway and the engine to an OpenTelemetry collector, configured by the OTEL_* variables.

Without a configured collector nothing is sent and OpenTelemetry is not imported. It sends OTLP over HTTP, in batches,
in its own thread with a bounded queue. So ending a span never blocks, and if a collector is down, only the oldest spans
are lost. OpenTelemetry reads its own variables: headers, certificates, timeout, sampler, batch sizes, resource
attributes.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any, Final

from stageline_api.errors import UserError

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL: Final = "http/protobuf"
CLOSE_SECONDS: Final = 2.0
"""How long the end of a process may wait until its last spans are sent."""
SERVICE_NAME: Final = "service.name"


def is_collector_named(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the standard variables ask to send spans."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = {name.strip() for name in environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")}
    return bool(exporters & {"otlp", ""}) and any(environ.get(name) for name in ENDPOINT_VARIABLES)


class SpanExport:
    """Creates spans of one service and sends them."""

    def __init__(self, service: str, attributes: Mapping[str, str], endpoint: str | None = None) -> None:
        """Send to the collector at `endpoint` (`http://host:4318`), or to the one in the environment.

        `service` names the process unless the environment does; `attributes` are further resource attributes.

        Raises:
            UserError: the optional extra isn't installed, or the variables ask for something unsupported.
        """
        if endpoint is None:
            _check_protocol(os.environ)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            message = "Tracing needs OpenTelemetry, which isn't installed: pip install 'stageline[tracing]'."
            raise UserError(message) from error
        resource = Resource.create(attributes)
        if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        # Without `shutdown_on_exit` only our thread closes it, within a time limit.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=None if endpoint is None else endpoint.rstrip("/") + "/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = SpanKind
        self._under = set_span_in_context
        self._tracer = self._provider.get_tracer("stageline")

    def server(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any], begin_nanoseconds: int | None = None
    ) -> Any:
        """The span of a request with `traceparent` and `tracestate` in `headers`; a new trace without them.

        The sampler decides here: by the caller's `sampled` flag, unless OTEL_TRACES_SAMPLER is set.
        """
        return self._tracer.start_span(
            name,
            context=self._propagator.extract(headers),
            kind=self._kinds.SERVER,
            attributes=attributes,
            start_time=begin_nanoseconds,
        )

    def child(
        self,
        name: str,
        parent: Any,
        attributes: Mapping[str, Any],
        begin_nanoseconds: int | None = None,
        *,
        is_call: bool = False,
    ) -> Any:
        """A child span of this process; `is_call`: it calls another process."""
        return self._tracer.start_span(
            name,
            context=self._under(parent),
            kind=self._kinds.CLIENT if is_call else self._kinds.INTERNAL,
            attributes=attributes,
            start_time=begin_nanoseconds,
        )

    def close(self) -> None:
        """Send pending spans; blocks for at most `CLOSE_SECONDS`, even if the collector hangs."""
        # OpenTelemetry's own limits apply to each batch, not to all of them together.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="last spans")
        closing.start()
        closing.join(CLOSE_SECONDS)


def _check_protocol(environ: Mapping[str, str]) -> None:
    for name in PROTOCOL_VARIABLES:
        if (given := environ.get(name, PROTOCOL).strip()) not in (PROTOCOL, ""):
            raise UserError(f"{name}={given!r} can't be used: spans are sent as {PROTOCOL} only.")
