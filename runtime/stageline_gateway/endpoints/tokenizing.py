"""`POST /tokenize` and `POST /detokenize`: a prompt as the model's engine would read it, and ids as text.

The bodies are those of vLLM's endpoints of the same names.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import Detokenized, DetokenizeRequest, TextPrompt, Tokenized, TokenizeRequest
from stageline_gateway.admission.request_body import off_the_loop
from stageline_gateway.endpoints.answers import CLIENT_GONE_CODE
from stageline_gateway.endpoints.json_answers import JsonAnswer, error_answer
from stageline_gateway.endpoints.services import Services
from stageline_gateway.engine_client.engine_calls import EngineCalls
from stageline_gateway.errors import ApiError, bad_value, not_ready
from stageline_gateway.groups.routing import choose, why_not_ready
from stageline_gateway.openai_api.chat_types import Messages, Strict, Tools, check_messages, check_tool_names
from stageline_gateway.openai_api.request_types import TokenId
from stageline_gateway.openai_api.translate import chat_prompt
from stageline_gateway.openai_api.validation import checked
from stageline_gateway.served_models import ServedModel
from stageline_gateway.telemetry.tracing import RequestContext, RequestSpan

MAX_TOKENS = 1024 * 1024


class TokenizeBody(Strict):
    """Either `prompt` or `messages`."""

    model: str
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = Field(default_factory=list)
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    """Left out, a prompt gets them and a chat doesn't: its template writes them."""
    return_token_strs: bool = False


class DetokenizeBody(Strict):
    """Token ids to turn into text."""

    model: str
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]


def parse_tokenize(fields: Mapping[str, Any]) -> TokenizeBody:
    body = checked(TokenizeBody, dict(fields))
    if (body.prompt is None) == (body.messages is None):
        raise bad_value("prompt", "Send either 'prompt' or 'messages'.")
    if body.prompt is not None and body.tools:
        raise bad_value("tools", "'tools' are only allowed with 'messages'.")
    check_messages(body.messages or [])
    check_tool_names(body.tools)
    return body


def parse_detokenize(fields: Mapping[str, Any]) -> DetokenizeBody:
    return checked(DetokenizeBody, dict(fields))


async def tokenize(
    calls: EngineCalls, group: GroupEndpoint, body: TokenizeBody, names: Mapping[str, str]
) -> dict[str, Any]:
    if body.messages is None:
        asked = TokenizeRequest(prompt=TextPrompt(text=body.prompt or ""))
    else:
        prompt = chat_prompt(body.messages, body.tools, guided=True)
        asked = TokenizeRequest(prompt=prompt.model_copy(update={"add_generation_prompt": body.add_generation_prompt}))
    options = {"add_special_tokens": body.add_special_tokens, "with_texts": body.return_token_strs}
    url, question = f"{group.url}/v1/tokenize", asked.model_copy(update=options)
    done = await calls.post(url, question, Tokenized, names, group.tls_name)
    return {
        "count": len(done.token_ids),
        "max_model_len": done.max_model_len,
        "tokens": list(done.token_ids),
        "token_strs": None if done.texts is None else list(done.texts),
    }


async def detokenize(
    calls: EngineCalls, group: GroupEndpoint, body: DetokenizeBody, names: Mapping[str, str]
) -> dict[str, Any]:
    asked = DetokenizeRequest(token_ids=tuple(body.tokens))
    done = await calls.post(f"{group.url}/v1/detokenize", asked, Detokenized, names, group.tls_name)
    return {"prompt": done.text}


Body = TypeVar("Body", TokenizeBody, DetokenizeBody)


def add_tokenize_routes(app: FastAPI, services: Services) -> None:
    @app.post("/tokenize")
    async def answer_tokenize(request: Request) -> Response:
        return await _answer(services, request, parse_tokenize, tokenize)

    @app.post("/detokenize")
    async def answer_detokenize(request: Request) -> Response:
        return await _answer(services, request, parse_detokenize, detokenize)


async def _answer(
    services: Services,
    request: Request,
    parse: Callable[[Mapping[str, Any]], Body],
    ask: Callable[[EngineCalls, GroupEndpoint, Body, Mapping[str, str]], Awaitable[dict[str, Any]]],
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
            fields = await held.read_object(request)
            body = await off_the_loop(held.size_bytes, lambda: parse(fields))
            model = services.served.asked_by(caller, body.model, services.settings.retry_after_seconds)
            permit = services.admission.permit(caller, model, held)
        calls = services.fleets.by_namespace[model.namespace].calls
        with permit:
            answer = await _ask(services, model, lambda group: ask(calls, group, body, mine | span.trace.headers()))
        status = 200
        return JsonAnswer(answer, headers=mine)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_CODE)
    except ApiError as error:
        status = error.status
        return error_answer(error, mine)
    finally:
        span.end(status)


async def _ask(
    services: Services, model: ServedModel, ask: Callable[[GroupEndpoint], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    backends = services.fleets.dispatcher_of(model).backends
    group = choose(backends.candidates(model.name), backends.ledger.loads)
    if group is None:
        message = why_not_ready(model.name, backends.groups_of(model.name))
        raise not_ready(message, services.settings.retry_after_seconds)
    return await ask(group)
