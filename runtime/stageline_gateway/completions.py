"""`POST /v1/chat/completions` and `POST /v1/completions`: from a checked body to an answer that streams itself."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stageline_api.engine_http import GenerateRequest
from stageline_gateway.answers import CLIENT_GONE_CODE, Answer, Exchange, StreamedAnswer, WholeAnswer
from stageline_gateway.body import read_object
from stageline_gateway.choices import merged, split
from stageline_gateway.dispatch import Dispatcher
from stageline_gateway.errors import ApiError
from stageline_gateway.metrics import GatewayMetrics, RequestMeter
from stageline_gateway.openai_types import ChatRequest, CompletionRequest
from stageline_gateway.responses import error_answer
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.translate import (
    ChatShape,
    CompletionShape,
    ShapeOfChoice,
    Stamp,
    chat_to_generate,
    completion_to_generate,
)
from stageline_gateway.upstream import StreamEvent
from stageline_gateway.validation import parse_chat, parse_completion


@dataclass(frozen=True, slots=True)
class Door:
    """What the completion endpoints need. `cut` is set when open answers must end now."""

    settings: GatewaySettings
    metrics: GatewayMetrics
    dispatcher: Dispatcher
    cut: asyncio.Event


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
    return Prepared(asked, chat_to_generate(asked, request_id, secrets.randbits(63)), ChatShape)


def prepare_completion(fields: Mapping[str, Any]) -> Prepared:
    """Check and translate a text completion; raises ApiError 400."""
    asked = parse_completion(fields)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    return Prepared(asked, completion_to_generate(asked, request_id, secrets.randbits(63)), CompletionShape)


def system_fingerprint(model: str) -> str:
    """What may change an answer besides the request: the model served and Stageline's version."""
    return "fp_" + sha256(f"{version('stageline')}/{model}".encode()).hexdigest()[:12]


async def complete(door: Door, prepare: Prepare, request: Request) -> Response:
    """Answer one request, or refuse it with an OpenAI error that is counted by its status."""
    arrived = time.monotonic()
    model = ""
    try:
        fields = await read_object(request, door.settings.body_limit_bytes, door.settings.body_timeout_seconds)
        prepared = prepare(fields)
        door.dispatcher.check_model(prepared.asked.model)
        model = prepared.asked.model
        return _answer(door, prepared, RequestMeter(door.metrics, model, arrived=arrived, choices=prepared.asked.n))
    except ApiError as error:
        door.metrics.requests.labels(model, str(error.status)).inc()
        return error_answer(error)
    except ClientDisconnect:
        door.metrics.requests.labels(model, str(CLIENT_GONE_CODE)).inc()
        return Response(status_code=CLIENT_GONE_CODE)


def _answer(door: Door, prepared: Prepared, meter: RequestMeter) -> Answer:
    asked, generate = prepared.asked, prepared.generate
    exchange = Exchange(
        events=merged([_events(door, asked, one) for one in split(generate, asked.n)]),
        shapes=[prepared.shape_of(choice) for choice in range(asked.n)],
        stamp=Stamp(generate.request_id, int(time.time()), asked.model, system_fingerprint(asked.model)),
        meter=meter,
        cut=door.cut,
        with_logprobs=asked.asked_top_logprobs is not None,
        include_usage=asked.include_usage,
    )
    return StreamedAnswer(exchange) if asked.stream else WholeAnswer(exchange)


async def _events(
    door: Door, asked: ChatRequest | CompletionRequest, generate: GenerateRequest
) -> AsyncGenerator[StreamEvent, None]:
    """The events of one choice; what its engine refuses is named by the client's own word for it."""
    try:
        async with aclosing(door.dispatcher.events(asked.model, generate)) as events:
            async for event in events:
                yield event
    except ApiError as error:
        limit = asked.limit_name
        if error.param != "max_tokens" or limit == "max_tokens":
            raise
        raise replace(error, param=limit, message=error.message.replace("max_tokens", limit)) from None
