"""A request's external ids (its `X-Request-Id`, its W3C trace context), and spans of requests.

`--otlp-endpoint`, or the standard OTEL_* variables, names a collector for spans. A request's span continues the
client's trace. Under it each run on an engine has a span. The engine gets it as its parent, so that a run on a killed
engine leaves one too. Spans hold names, counts and codes, never text. Without a collector, trace context is only
forwarded, and OpenTelemetry, an optional extra, is never imported.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from msgspec import structs
from starlette.datastructures import Headers

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import GenerateRequest
from stageline_api.errors import UserError
from stageline_api.telemetry.span_export import SpanExport, is_collector_named
from stageline_gateway.engine_client.run_events import EngineLostError, EngineRefusedError

logger = logging.getLogger(__name__)

SERVICE_NAME: Final = "stageline-gateway"
RUN_SPAN: Final = "gateway.run"
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_STATE_CHARACTERS: Final = 512
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_STATE_MEMBER: Final = re.compile(
    r"[a-z0-9][a-z0-9_\-*/]{0,255}(@[a-z0-9][a-z0-9_\-*/]{0,13})?=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)


class TraceContext(NamedTuple):
    """W3C trace context; None where there is none."""

    parent: str | None = None
    """`traceparent`."""
    state: str | None = None
    """`tracestate`."""

    def headers(self) -> dict[str, str]:
        named = {"traceparent": self.parent, "tracestate": self.state}
        return {name: value for name, value in named.items() if value is not None}


class RequestContext(NamedTuple):
    """Client-supplied ids; None if the client sent none that is valid. An invalid id never rejects a request.

    An id that can't be used unchanged in a log line or a header (too long, not printable ASCII) is replaced by the
    gateway's own. A malformed `traceparent` is dropped, as the recommendation demands
    (https://www.w3.org/TR/trace-context/, section 3.2), and with it its `tracestate`.
    """

    request_id: str | None = None
    trace: TraceContext = TraceContext()

    @classmethod
    def of(cls, headers: Headers) -> "RequestContext":
        parent = _traceparent(headers.get("traceparent"))
        # A tracestate may come in several headers, which are one list.
        state = None if parent is None else _tracestate(",".join(headers.getlist("tracestate")))
        return cls(_request_id(headers.get("x-request-id")), TraceContext(parent, state))


def _request_id(value: str | None) -> str | None:
    if not value or len(value) > MAX_REQUEST_ID_CHARACTERS:
        return None
    return value if value.isascii() and value.isprintable() else None


def _traceparent(value: str | None) -> str | None:
    """Version ff is invalid, and so are ids of zeros alone."""
    found = _TRACEPARENT.fullmatch(value or "")
    if (
        found is None
        or value is None
        or value.startswith("ff")
        or not all(set(part) - {"0"} for part in found.groups())
    ):
        return None
    return value


def _tracestate(value: str) -> str | None:
    """Empty members are allowed; one that breaks the form makes all of it invalid."""
    members = [member.strip(" \t") for member in value.split(",")]
    given = [member for member in members if member]
    if not given or not all(map(_STATE_MEMBER.fullmatch, given)):
        return None
    state = ",".join(given)
    return state if len(state) <= MAX_STATE_CHARACTERS else None


class RequestSpan:
    """One request without a collector: the client's trace context is sent to the engine unchanged."""

    trace_id = ""
    """The trace that this span is recorded in, 32 hexadecimal digits; empty where none is."""

    def __init__(self, trace: TraceContext | None = None) -> None:
        self.trace = trace or TraceContext()
        """The context for an engine that is asked outside of a run, such as for tokenizing."""

    @contextmanager
    def run(self, group: GroupEndpoint, number: int, request: GenerateRequest) -> Iterator[GenerateRequest]:  # noqa: ARG002 - for those that override it
        """The `number`th run of a choice, on `group`, with the request as its engine gets it.

        The error that leaves the context is how the run ended.
        """
        yield request

    def end(self, status: int, **attributes: str | int | bool) -> None:
        """The request was answered with `status`."""


class Tracing:
    """Begins spans; this one without a collector."""

    def begin(self, path: str, client: TraceContext) -> RequestSpan:  # noqa: ARG002 - for those that override it
        """A request to `path` has come, with the client's trace context."""
        return RequestSpan(client)

    def close(self) -> None:
        """Send pending spans, within a bound of time."""


class _OtelSpan(RequestSpan):
    def __init__(self, span: Any, export: SpanExport) -> None:
        self._span = span
        self._export = export
        super().__init__(_context_of(span))
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.trace_flags.sampled else ""

    @contextmanager
    def run(self, group: GroupEndpoint, number: int, request: GenerateRequest) -> Iterator[GenerateRequest]:
        attributes = {
            "url.full": group.url,
            "gen_ai.provider.name": "stageline",
            "gen_ai.request.model": group.model,
            "stageline.request_id": request.request_id,
            "stageline.group": group.group,
            "stageline.incarnation": group.incarnation,
            "stageline.run": number,
            "stageline.resumed_tokens": len(request.generated_token_ids),
        }
        span = self._export.child(RUN_SPAN, self._span, attributes, is_call=True)
        try:
            yield structs.replace(request, **_context_of(span).headers())
        except BaseException as error:
            _note_failure(span, error)
            raise
        finally:
            span.end()

    def end(self, status: int, **attributes: str | int | bool) -> None:
        """Names as in OpenTelemetry's semantic conventions for HTTP servers."""
        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attributes({f"stageline.{name}": value for name, value in attributes.items()})
        self._span.end()


def _context_of(span: Any) -> TraceContext:
    context = span.get_span_context()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return TraceContext(parent, context.trace_state.to_header() or None)


def _note_failure(span: Any, error: BaseException) -> None:
    match error:
        case EngineLostError(kind=kind, message=message):
            _fail(span, kind.value, message)
        case EngineRefusedError(error=refusal):
            _fail(span, refusal.code.value, "The engine did not take the request.")
        case Exception():
            _fail(span, type(error).__name__, "A bug in the gateway.")
        case _:  # cancelled: the client has left, or the gateway ends
            _fail(span, "left", "Nobody waits for the answer any more.")


def _fail(span: Any, kind: str, sentence: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, sentence)


class OtelTracing(Tracing):
    def __init__(self, endpoint: str | None) -> None:
        """Send to the collector at `endpoint`, or to the one in the environment; raises UserError when it can't."""
        self._export = SpanExport(SERVICE_NAME, {}, endpoint)

    def begin(self, path: str, client: TraceContext) -> RequestSpan:
        attributes = {"http.request.method": "POST", "http.route": path}
        return _OtelSpan(self._export.server(f"POST {path}", client.headers(), attributes), self._export)

    def close(self) -> None:
        self._export.close()


def open_tracing(endpoint: str | None) -> Tracing:
    """Tracing to `endpoint`, else to the collector that the environment names, or none.

    Raises:
        UserError: `endpoint` is given and tracing can't be had. Variables may be meant for others: they only warn.
    """
    if endpoint is not None:
        return OtelTracing(endpoint)
    if not is_collector_named():
        return Tracing()
    try:
        return OtelTracing(None)
    except UserError as error:
        logger.warning("no spans are sent: %s", error.message)
        return Tracing()
