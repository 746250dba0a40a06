"""The routes of `tokenizing`, on any ready group of the model asked for."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stageline_gateway.endpoints.answers import CLIENT_GONE_CODE
from stageline_gateway.endpoints.completions import Door
from stageline_gateway.endpoints.tokenizing import detokenize, parse_detokenize, parse_tokenize, tokenize
from stageline_gateway.engine_client.engine_calls import CallFailedError, EngineCalls
from stageline_gateway.errors import ApiError, not_ready
from stageline_gateway.groups.routing import choose, why_not_ready
from stageline_gateway.server.responses import JsonAnswer, error_answer
from stageline_gateway.telemetry.request_context import RequestContext


class NamesModel(Protocol):
    """A checked body."""

    @property
    def model(self) -> str:
        """The model asked for."""


Body = TypeVar("Body", bound=NamesModel)


def add_tokenize_routes(app: FastAPI, door: Door, calls: EngineCalls) -> None:
    """Add both routes."""

    @app.post("/tokenize")
    async def answer_tokenize(request: Request) -> Response:
        return await _answer(door, calls, request, parse_tokenize, tokenize)

    @app.post("/detokenize")
    async def answer_detokenize(request: Request) -> Response:
        return await _answer(door, calls, request, parse_detokenize, detokenize)


async def _answer(
    door: Door,
    calls: EngineCalls,
    request: Request,
    parse: Callable[[Mapping[str, Any]], Body],
    ask: Callable[[EngineCalls, str, Body, Mapping[str, str]], Awaitable[dict[str, Any]]],
) -> Response:
    """Counts as a request of its key, and has a place, a span and its client's names like any other."""
    context = RequestContext.of(request.headers)
    span = door.tracing.begin(request.url.path, context.trace)
    mine = {} if context.request_id is None else {"x-request-id": context.request_id}
    status = CLIENT_GONE_CODE
    try:
        caller = door.caller_of(request)
        with door.admission.body_of(caller) as hold:
            body = parse(await door.read(request, hold))
            caller.check_model(body.model)
            door.dispatcher.check_model(body.model)
            permit = door.admission.permit(caller, body.model, hold)
        with permit:
            told = await _ask(door, body, lambda url: ask(calls, url, body, mine | span.trace.headers()))
        status = 200
        return JsonAnswer(told, headers=mine)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_CODE)
    except ApiError as error:
        status = error.status
        return error_answer(error, mine)
    finally:
        span.end(status)


async def _ask(door: Door, body: NamesModel, ask: Callable[[str], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """What a ready engine says; raises ApiError."""
    backends = door.dispatcher.backends
    group = choose(backends.candidates(body.model), backends.ledger.loads)
    if group is None:
        message = why_not_ready(body.model, backends.groups_of(body.model))
        raise not_ready(message, door.settings.retry_after_seconds)
    try:
        return await ask(group.url)
    except CallFailedError as failure:
        raise failure.error from None
