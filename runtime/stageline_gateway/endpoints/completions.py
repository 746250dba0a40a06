"""`POST /v1/chat/completions` and `POST /v1/completions`: from a checked body to an answer that streams itself."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stageline_api.engine_http import GenerateRequest
from stageline_gateway.admission.admission import Admission, Permit
from stageline_gateway.admission.body_memory import BodyHold
from stageline_gateway.admission.keys import Caller
from stageline_gateway.admission.request_body import read_object
from stageline_gateway.endpoints.answers import CLIENT_GONE_CODE, Answer, Exchange, StreamedAnswer, WholeAnswer
from stageline_gateway.engine_client.stream_events import StreamEvent
from stageline_gateway.errors import ApiError, gateway_failed
from stageline_gateway.groups.affinity import SESSION_HEADER
from stageline_gateway.openai_api.answer_shapes import CompletionShape, ShapeOfChoice, Stamp
from stageline_gateway.openai_api.request_types import ChatRequest, CompletionRequest
from stageline_gateway.openai_api.tool_answer_shape import shape_of_chat
from stageline_gateway.openai_api.translate import chat_to_generate, completion_to_generate
from stageline_gateway.openai_api.validation import parse_chat, parse_completion
from stageline_gateway.relay.choices import merged, split
from stageline_gateway.relay.dispatch import Ask, Dispatcher
from stageline_gateway.server.responses import error_answer
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.metrics import GatewayMetrics
from stageline_gateway.telemetry.request_context import RequestContext
from stageline_gateway.telemetry.request_meter import RequestMeter
from stageline_gateway.telemetry.tracing import NoTracing, RequestSpan, Tracing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Door:
    """What the completion endpoints need. `cut` is set when open answers must end now."""

    settings: GatewaySettings
    metrics: GatewayMetrics
    dispatcher: Dispatcher
    admission: Admission
    cut: asyncio.Event
    tracing: Tracing = field(default_factory=NoTracing)

    def caller_of(self, request: Request) -> Caller:
        """Who sent `request`; raises ApiError 401."""
        return self.admission.caller_of(request.headers.get("authorization"))

    async def read(self, request: Request, hold: BodyHold) -> dict[str, Any]:
        """The body of `request`, an object; raises ApiError and ClientDisconnect."""
        settings = self.settings
        return await read_object(request, settings.body_limit_bytes, settings.body_timeout_seconds, hold)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request in both languages."""

    asked: ChatRequest | CompletionRequest
    generate: GenerateRequest
    shape_of: ShapeOfChoice


Prepare = Callable[[Mapping[str, Any]], Prepared]


def prepare_chat(fields: Mapping[str, Any]) -> Prepared:
    """Check and translate a chat; raises ApiError 400."""
    asked = parse_chat(fields)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    return Prepared(asked, chat_to_generate(asked, request_id, secrets.randbits(63)), shape_of_chat(asked))


def prepare_completion(fields: Mapping[str, Any]) -> Prepared:
    """Check and translate a text completion; raises ApiError 400."""
    asked = parse_completion(fields)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    return Prepared(asked, completion_to_generate(asked, request_id, secrets.randbits(63)), CompletionShape)


@cache
def _stageline_version() -> str:
    # Reading a distribution's metadata takes longer than all else that is done for a request.
    return version("stageline")


def system_fingerprint(model: str) -> str:
    """What may change an answer besides the request: the model served and Stageline's version."""
    return "fp_" + sha256(f"{_stageline_version()}/{model}".encode()).hexdigest()[:12]


async def complete(door: Door, prepare: Prepare, request: Request) -> Response:
    """Answer one request, or refuse it with an OpenAI error that is counted by its status."""
    arrived = time.monotonic()
    model = ""
    context = RequestContext.of(request.headers)
    span = door.tracing.begin(request.url.path, context.trace)
    context = replace(context, trace=span.trace)
    caller = None
    try:
        caller = door.caller_of(request)
        with door.admission.body_of(caller) as hold:
            prepared = _named(prepare(await door.read(request, hold)), context, caller)
            caller.check_model(prepared.asked.model)
            door.dispatcher.check_model(prepared.asked.model)
            model = prepared.asked.model
            permit = door.admission.permit(caller, model, hold, places=prepared.asked.n)
            meter = RequestMeter(door.metrics, model, arrived=arrived, choices=prepared.asked.n, trace_id=span.trace_id)
            return _answer(door, prepared, meter, permit, request.headers.get(SESSION_HEADER, ""), span)
    except ApiError as error:
        failure = error
    except ClientDisconnect:
        span.end(CLIENT_GONE_CODE)
        door.metrics.requests.labels(model, str(CLIENT_GONE_CODE)).inc()
        return Response(status_code=CLIENT_GONE_CODE)
    except Exception as error:  # a bug; handled here it is counted, and the connection can be used again
        logger.exception("a bug in the gateway: %s", type(error).__name__)
        failure = gateway_failed()
    span.end(failure.status)
    door.metrics.requests.labels(model, str(failure.status)).inc()
    names = {"x-request-id": context.request_id or f"req-{uuid.uuid4().hex}"}
    return error_answer(failure, names | ({} if caller is None else door.admission.headers_for(caller)))


def _named(prepared: Prepared, context: RequestContext, caller: Caller) -> Prepared:
    """The same, with the client's names for it and its key's priority, for the engine."""
    names: dict[str, Any] = {"client_request_id": context.request_id, "priority": caller.priority}
    names |= context.trace.headers()
    return replace(prepared, generate=prepared.generate.model_copy(update=names))


def _answer(
    door: Door, prepared: Prepared, meter: RequestMeter, permit: Permit, session: str, span: RequestSpan
) -> Answer:
    asked, generate = prepared.asked, prepared.generate
    asks = [Ask(asked.model, one, session, span) for one in split(generate, asked.n)]
    exchange = Exchange(
        events=merged([_events(door, asked, ask) for ask in asks]),
        shapes=[prepared.shape_of(choice) for choice in range(asked.n)],
        stamp=Stamp(generate.request_id, int(time.time()), asked.model, system_fingerprint(asked.model)),
        meter=meter,
        permit=permit,
        send_timeout_seconds=door.settings.send_timeout_seconds,
        cut=door.cut,
        with_logprobs=asked.asked_top_logprobs is not None,
        include_usage=asked.include_usage,
        client_request_id=generate.client_request_id,
        span=span,
    )
    return StreamedAnswer(exchange) if asked.stream else WholeAnswer(exchange)


async def _events(door: Door, asked: ChatRequest | CompletionRequest, ask: Ask) -> AsyncGenerator[StreamEvent, None]:
    """The events of one choice; what its engine refuses is named by the client's own word for it."""
    try:
        async with aclosing(door.dispatcher.events(ask)) as events:
            async for event in events:
                yield event
    except ApiError as error:
        raise _in_words_of(asked, error) from None


def _in_words_of(asked: ChatRequest | CompletionRequest, error: ApiError) -> ApiError:
    """The engine's refusal with the client's own names for fields that have several."""
    theirs = {"max_tokens": asked.limit_name, "response_format": asked.schema_field}.get(error.param or "", error.param)
    if error.param is None or theirs is None or theirs == error.param:
        return error
    return replace(error, param=theirs, message=error.message.replace(error.param, theirs))
