"""`POST /tokenize` and `POST /detokenize`: a prompt as the model's engine would read it, and ids as text.

The routes are vLLM's, and `tokenize_requests` checks their bodies; `POST /v1/messages/count_tokens` is Anthropic's and
says how many tokens a message's prompt has. The engine's answer counts in the room of open requests as it comes, for
what will be made of it, and what is large is made in a thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stageline_api.engine_http import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from stageline_gateway.endpoints.answers import CLIENT_GONE_CODE, Refuse, ignored_header
from stageline_gateway.endpoints.json_answers import JsonAnswer, error_answer, refuse_message, with_request_id
from stageline_gateway.endpoints.services import Services
from stageline_gateway.engine_client.engine_calls import Read
from stageline_gateway.errors import ApiError, not_ready
from stageline_gateway.groups.routing import choose, why_not_ready
from stageline_gateway.large_work import off_the_loop
from stageline_gateway.openai_api.dialects.prepared import prepare_message
from stageline_gateway.openai_api.tokenize_requests import only_counted, parse_detokenize, parse_tokenize
from stageline_gateway.served_models import ServedModel
from stageline_gateway.telemetry.tracing import RequestContext, RequestSpan

IDS_FACTOR: Final = 16
"""What a byte of an engine's ids, or of tokens' texts, is held as at most: an object, its places in two lists, JSON."""
TEXT_FACTOR: Final = 8
"""The same of a text's: four for each character where one of them is wide, and its JSON."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an engine is asked for one request."""

    model: str
    path: str
    body: bytes
    read: Read[Any]
    written: Callable[[Any], dict[str, Any]]
    """The engine's answer in the client's form."""
    factor: int
    ignored: tuple[str, ...] = ()
    """Names of the client's fields that change nothing here."""


def tokenize_question(fields: Mapping[str, Any], strict: bool) -> Question:
    asked = parse_tokenize(fields, strict)
    options = asked.options
    told = TokenizeRequest(
        prompt=asked.prompt, add_special_tokens=options.add_special_tokens, with_texts=options.return_token_strs
    ).to_json()
    return Question(asked.model, "/v1/tokenize", told, Tokenized.from_json, _written_ids, IDS_FACTOR, asked.ignored)


def detokenize_question(fields: Mapping[str, Any], strict: bool) -> Question:
    body, ignored = parse_detokenize(fields, strict)
    told = DetokenizeRequest(token_ids=tuple(body.tokens)).to_json()
    return Question(body.model, "/v1/detokenize", told, Detokenized.from_json, _written_text, TEXT_FACTOR, ignored)


def counting_question(fields: Mapping[str, Any], strict: bool) -> Question:
    """How many tokens the prompt of a message has."""
    # The one field that a message must have, and a count doesn't.
    prepared = prepare_message({"max_tokens": 1, **fields}, strict)
    told = TokenizeRequest(prompt=only_counted(prepared.generate.prompt)).to_json()
    read, model = Tokenized.from_json, prepared.asked.model
    return Question(model, "/v1/tokenize", told, read, _written_count, IDS_FACTOR, prepared.ignored)


def _written_ids(done: Tokenized) -> dict[str, Any]:
    return {
        "count": len(done.token_ids),
        "max_model_len": done.max_model_len,
        "tokens": list(done.token_ids),
        "token_strs": None if done.texts is None else list(done.texts),
    }


def _written_text(done: Detokenized) -> dict[str, Any]:
    return {"prompt": done.text}


def _written_count(done: Tokenized) -> dict[str, Any]:
    return {"input_tokens": len(done.token_ids)}


def add_tokenize_routes(app: FastAPI, services: Services) -> None:
    strict = services.settings.strict_fields

    @app.post("/tokenize")
    async def answer_tokenize(request: Request) -> Response:
        return await answer_question(services, request, lambda fields: tokenize_question(fields, strict))

    @app.post("/detokenize")
    async def answer_detokenize(request: Request) -> Response:
        return await answer_question(services, request, lambda fields: detokenize_question(fields, strict))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        ask = partial(counting_question, strict=strict)
        return with_request_id(await answer_question(services, request, ask, refuse_message))


async def answer_question(
    services: Services,
    request: Request,
    ask: Callable[[Mapping[str, Any]], Question],
    refuse: Refuse = error_answer,
) -> Response:
    """Takes a place, and has limits, a span and the client's names, like a completion."""
    context = RequestContext.of(request.headers)
    span = RequestSpan()
    mine = {} if context.request_id is None else {"x-request-id": context.request_id}
    status = CLIENT_GONE_CODE
    try:
        caller = services.admission.caller_of(request.headers)
        span = services.tracing.begin(request.url.path, context.trace)
        with services.admission.body_of(caller) as held:
            question = await held.made_of(request, ask, lambda made: (made.model, made.ignored))
            model = services.served.asked_by(caller, question.model, services.settings.retry_after_seconds)
            held.grow(held.text_bytes)
            permit = services.admission.permit(caller, model, held)
        with permit:
            done = await _ask(services, model, question, permit.body.grow, mine | span.trace.headers())
        status = 200
        done.headers.update(mine | ignored_header(question.ignored))
        return done
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_CODE)
    except ApiError as error:
        status = error.status
        return refuse(error, mine)
    finally:
        span.end(status)


async def _ask(
    services: Services, model: ServedModel, question: Question, hold: Callable[[int], None], names: Mapping[str, str]
) -> Response:
    """`hold` counts bytes before they are held."""
    backends = services.fleets.dispatcher_of(model).backends
    group = choose(backends.candidates(model.name), backends.ledger.loads)
    if group is None:
        message = why_not_ready(model.name, backends.groups_of(model.name))
        raise not_ready(message, services.settings.retry_after_seconds)
    size_bytes = 0

    def count(more_bytes: int) -> None:
        nonlocal size_bytes
        size_bytes += more_bytes
        hold(question.factor * more_bytes)

    calls = services.fleets.by_namespace[model.namespace].calls
    url = f"{group.url}{question.path}"
    done = await calls.post(url, question.body, question.read, names, group.tls_name, count)
    return await off_the_loop(size_bytes, lambda: JsonAnswer(question.written(done)))
