"""The routes that generate, of all APIs: from a request's headers and body to its answer.

Whatever refuses a request on this way (key, limits, body, fields, model) is an `ApiError`, and is counted here by its
status. What happens after that, from the wait for a place on, is `answers`'.
"""

import logging
import time
from functools import lru_cache, partial
from hashlib import sha256

from fastapi import FastAPI
from msgspec import structs
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stageline_api.version import stageline_version
from stageline_gateway.admission.admission import Permit
from stageline_gateway.admission.keys import Caller
from stageline_gateway.admission.request_body import HeldBody
from stageline_gateway.client_stream import client_of
from stageline_gateway.endpoints.answers import (
    CLIENT_GONE_CODE,
    Answer,
    Exchange,
    Refuse,
    StreamedAnswer,
    WholeAnswer,
)
from stageline_gateway.endpoints.direct_routes import add_direct_post
from stageline_gateway.endpoints.json_answers import error_answer, new_request_id, refuse_message
from stageline_gateway.endpoints.services import Services
from stageline_gateway.endpoints.translated import TranslatedAnswer
from stageline_gateway.errors import ApiError, gateway_failed, not_stored, not_supported
from stageline_gateway.groups.routing import SESSION_HEADER
from stageline_gateway.openai_api.answer_shapes import Stamp
from stageline_gateway.openai_api.dialects.prepared import prepare_message, prepare_response
from stageline_gateway.openai_api.translate import Prepare, Prepared, prepare_chat, prepare_completion
from stageline_gateway.relay.dispatch import Dispatcher, GenerateJob
from stageline_gateway.served_models import ServedModel
from stageline_gateway.telemetry.metrics import RequestMeter
from stageline_gateway.telemetry.tracing import RequestContext, RequestSpan, TraceContext

logger = logging.getLogger(__name__)


def add_completions(app: FastAPI, services: Services) -> None:
    async def chat_completions(request: Request) -> Response:
        return await complete(services, prepare_chat, request)

    async def completions(request: Request) -> Response:
        return await complete(services, prepare_completion, request)

    async def responses(request: Request) -> Response:
        return await complete(services, prepare_response, request)

    async def messages(request: Request) -> Response:
        return await complete(services, prepare_message, request, refuse_message)

    add_direct_post(app, "/v1/chat/completions", chat_completions)
    add_direct_post(app, "/v1/completions", completions)

    add_direct_post(app, "/v1/responses", responses)
    add_direct_post(app, "/v1/messages", messages)

    @app.get("/v1/responses/{response}")
    @app.delete("/v1/responses/{response}")
    async def stored_response(request: Request, response: str) -> Response:  # noqa: ARG001 - part of the path
        services.admission.caller_asking(request.headers)
        raise not_stored("response")

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        services.admission.caller_asking(request.headers)
        raise not_supported("The models served here generate text; none of them makes embeddings.")


@lru_cache(maxsize=256)
def system_fingerprint(model: str) -> str:
    """What may change an answer besides the request: the model served and Stageline's version."""
    return "fp_" + sha256(f"{stageline_version()}/{model}".encode()).hexdigest()[:12]


async def complete(
    services: Services,
    prepare: Prepare,
    request: Request,
    refuse: Refuse = error_answer,
) -> Response:
    """Answer one request, or `refuse` it with an error that is counted by its status."""
    arrived = time.monotonic()
    model: ServedModel | None = None
    context = RequestContext.of(request.headers)
    span, caller = RequestSpan(), None
    try:
        caller = services.admission.caller_of(request.headers)
        # Not before: who has no key fills no collector.
        span = services.tracing.begin(request.scope["path"], context.trace)
        with services.admission.body_of(caller) as body:
            prepared = await _prepared(request, body, prepare, services.settings.strict_fields)
            model = services.served.asked_by(caller, prepared.asked.model, services.settings.retry_after_seconds)
            choices, dispatcher = prepared.asked.num_choices, services.fleets.by_namespace[model.namespace].dispatcher
            adapter = dispatcher.backends.discovered.adapter_of(model.name)
            prepared = _with_context(prepared, context.request_id, span.trace, caller, adapter)
            body.copy(prepared.asked.n - 1 + prepared.asked.num_echoes + 2 * bool(prepared.dialect))
            body.hold_line()
            permit = services.admission.permit(caller, model, body, places=choices)
            metrics = services.metrics.of(model.namespace)
            meter = RequestMeter(metrics, model.name, arrived=arrived, choices=choices, trace_id=span.trace_id)
            return _answer(
                services, dispatcher, prepared, meter, permit, request.headers.get(SESSION_HEADER, ""), span, refuse
            )
    except ApiError as error:
        failure = error.bare()
    except ClientDisconnect:
        span.end(CLIENT_GONE_CODE)
        services.metrics.refused(CLIENT_GONE_CODE, model)
        return Response(status_code=CLIENT_GONE_CODE)
    except Exception as error:  # a bug; handled here it is counted, and the connection can be used again
        logger.exception("a bug in the gateway: %s", type(error).__name__)
        failure = gateway_failed()
    span.end(failure.status)
    services.metrics.refused(failure.status, model)
    names = {"x-request-id": context.request_id or new_request_id()}
    return refuse(failure, names | ({} if caller is None else services.admission.headers_for(caller)))


async def _prepared(request: Request, body: HeldBody, prepare: Prepare, strict: bool) -> Prepared:
    fields = await body.parsed(await body.read(request, client_of(request.scope).take_body()))
    return await body.made(lambda: prepare(fields, strict), lambda made: (made, fields if made.dialect else None))


def _with_context(
    prepared: Prepared, client_request_id: str | None, trace: TraceContext, caller: Caller, adapter: str | None
) -> Prepared:
    """The same, with the client's id and trace context, its key's priority and the adapter, for the engine."""
    known = {
        "client_request_id": client_request_id,
        "priority": caller.priority or None,
        "adapter": adapter,
        "traceparent": trace.parent,
        "tracestate": trace.state,
    }
    update = {name: value for name, value in known.items() if value is not None}
    if not update:
        return prepared
    return prepared._replace(generate=structs.replace(prepared.generate, **update))


def _answer(
    services: Services,
    dispatcher: Dispatcher,
    prepared: Prepared,
    meter: RequestMeter,
    permit: Permit,
    session: str,
    span: RequestSpan,
    refuse: Refuse,
) -> Answer:
    asked, generate = prepared.asked, prepared.generate
    job = GenerateJob(permit.model.name, generate, session, span, prepared.prompts, prepared.to_client_error)
    exchange = Exchange(
        run=partial(dispatcher.run_choices, job, asked.num_choices),
        shapes=[prepared.shape_of(choice) for choice in range(asked.num_choices)],
        stamp=Stamp(generate.request_id, int(time.time()), asked.model, system_fingerprint(permit.model.full_name)),
        meter=meter,
        permit=permit,
        cut=services.cut,
        with_logprobs=asked.asked_top_logprobs is not None,
        include_usage=asked.include_usage,
        keep_alive_seconds=services.settings.keep_alive_seconds,
        num_prompts=asked.num_prompts,
        client_request_id=generate.client_request_id,
        ignored=prepared.ignored,
        client_names=prepared.names,
        span=span,
    )
    if prepared.dialect is not None:
        dialect = prepared.dialect(exchange.stamp)
        exchange.id_header = dialect.id_header
        return TranslatedAnswer(exchange, dialect, refuse, asked.stream)
    return StreamedAnswer(exchange) if asked.stream else WholeAnswer(exchange)
