"""`POST /v1/chat/completions` and `POST /v1/completions`: from a request's headers and body to its answer.

Whatever refuses a request on this way (key, limits, body, fields, model) is an `ApiError`, and is counted here by its
status. What happens after that, from the wait for a place on, is `answers`'.
"""

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stageline_api.engine_http import GenerateRequest
from stageline_gateway.admission.admission import Permit
from stageline_gateway.admission.keys import Caller
from stageline_gateway.endpoints.answers import CLIENT_GONE_CODE, Answer, Exchange, StreamedAnswer, WholeAnswer
from stageline_gateway.endpoints.services import Services
from stageline_gateway.errors import ApiError, gateway_failed, not_supported
from stageline_gateway.groups.routing import SESSION_HEADER
from stageline_gateway.openai_api.answer_shapes import ChatShape, CompletionShape, ShapeOfChoice, Stamp
from stageline_gateway.openai_api.request_types import ChatRequest, CompletionRequest
from stageline_gateway.openai_api.tool_calls import shape_with_tools
from stageline_gateway.openai_api.translate import chat_to_generate, completion_to_generate
from stageline_gateway.openai_api.validation import parse_chat, parse_completion
from stageline_gateway.relay.dispatch import Deliver, GenerateJob
from stageline_gateway.server.responses import error_answer
from stageline_gateway.telemetry.metrics import RequestMeter
from stageline_gateway.telemetry.tracing import RequestContext, RequestSpan

logger = logging.getLogger(__name__)


def add_completions(app: FastAPI, services: Services) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await complete(services, prepare_chat, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(services, prepare_completion, request)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        services.admission.caller_of(request.headers)
        raise not_supported("The models served here generate text; none of them makes embeddings.")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, as the client sent it and as the engine gets it."""

    asked: ChatRequest | CompletionRequest
    generate: GenerateRequest
    shape_of: ShapeOfChoice


Prepare = Callable[[Mapping[str, Any]], Prepared]


def prepare_chat(fields: Mapping[str, Any]) -> Prepared:
    asked = parse_chat(fields)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    shape = shape_with_tools(asked) if asked.offered_tools else ChatShape
    return Prepared(asked, chat_to_generate(asked, request_id, secrets.randbits(63)), shape)


def prepare_completion(fields: Mapping[str, Any]) -> Prepared:
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


async def complete(services: Services, prepare: Prepare, request: Request) -> Response:
    """Answer one request, or refuse it with an OpenAI error that is counted by its status."""
    arrived = time.monotonic()
    model = ""
    context = RequestContext.of(request.headers)
    span = services.tracing.begin(request.url.path, context.trace)
    context = replace(context, trace=span.trace)
    caller = None
    try:
        caller = services.admission.caller_of(request.headers)
        with services.admission.body_of(caller) as body:
            prepared = _with_context(prepare(await body.read_object(request)), context, caller)
            caller.check_model(prepared.asked.model)
            services.dispatcher.check_model(prepared.asked.model)
            model, choices = prepared.asked.model, prepared.asked.n
            permit = services.admission.permit(caller, model, body, places=choices)
            meter = RequestMeter(services.metrics, model, arrived=arrived, choices=choices, trace_id=span.trace_id)
            return _answer(services, prepared, meter, permit, request.headers.get(SESSION_HEADER, ""), span)
    except ApiError as error:
        failure = error
    except ClientDisconnect:
        span.end(CLIENT_GONE_CODE)
        services.metrics.requests.labels(model, str(CLIENT_GONE_CODE)).inc()
        return Response(status_code=CLIENT_GONE_CODE)
    except Exception as error:  # a bug; handled here it is counted, and the connection can be used again
        logger.exception("a bug in the gateway: %s", type(error).__name__)
        failure = gateway_failed()
    span.end(failure.status)
    services.metrics.requests.labels(model, str(failure.status)).inc()
    names = {"x-request-id": context.request_id or f"req-{uuid.uuid4().hex}"}
    return error_answer(failure, names | ({} if caller is None else services.admission.headers_for(caller)))


def _with_context(prepared: Prepared, context: RequestContext, caller: Caller) -> Prepared:
    """The same, with the client's id and trace context and its key's priority, for the engine."""
    update: dict[str, Any] = {"client_request_id": context.request_id, "priority": caller.priority}
    update |= context.trace.headers()
    return replace(prepared, generate=prepared.generate.model_copy(update=update))


def _answer(
    services: Services, prepared: Prepared, meter: RequestMeter, permit: Permit, session: str, span: RequestSpan
) -> Answer:
    asked, generate = prepared.asked, prepared.generate
    job = GenerateJob(asked.model, generate, session, span)

    async def run(deliver: Deliver) -> None:
        try:
            await services.dispatcher.run_choices(job, asked.n, deliver)
        except ApiError as error:
            raise _in_words_of(asked, error) from None

    exchange = Exchange(
        run=run,
        shapes=[prepared.shape_of(choice) for choice in range(asked.n)],
        stamp=Stamp(generate.request_id, int(time.time()), asked.model, system_fingerprint(asked.model)),
        meter=meter,
        permit=permit,
        send_timeout_seconds=services.settings.send_timeout_seconds,
        cut=services.cut,
        with_logprobs=asked.asked_top_logprobs is not None,
        include_usage=asked.include_usage,
        client_request_id=generate.client_request_id,
        span=span,
    )
    return StreamedAnswer(exchange) if asked.stream else WholeAnswer(exchange)


def _in_words_of(asked: ChatRequest | CompletionRequest, error: ApiError) -> ApiError:
    """The engine's refusal with the client's own names for fields that have several."""
    theirs = {"max_tokens": asked.limit_name, "response_format": asked.schema_field}.get(error.param or "", error.param)
    if error.param is None or theirs is None or theirs == error.param:
        return error
    return replace(error, param=theirs, message=error.message.replace(error.param, theirs))
