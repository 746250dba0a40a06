"""`POST /v1/messages`: Anthropic's API, answered like a chat; refusals have Anthropic's form too."""

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.anthropic_api.messages_events import MessagesDialect, error_body
from stageline_gateway.anthropic_api.messages_request import (
    MESSAGES_KNOWN,
    PARAMS,
    MessagesRequest,
    as_chat,
    without_hints,
)
from stageline_gateway.endpoints.completions import Prepared, complete, prepared_chat
from stageline_gateway.endpoints.services import Services
from stageline_gateway.errors import ApiError, bad_value
from stageline_gateway.openai_api.validation import IgnoredFields, checked, in_words, settled, without_effect
from stageline_gateway.server.responses import JsonAnswer


def add_messages(app: FastAPI, services: Services) -> None:
    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await complete(services, prepare_message, request, refuse)


def refuse(error: ApiError, headers: Mapping[str, str]) -> Response:
    return JsonAnswer(error_body(error), status_code=error.status, headers={**headers, **error.headers()})


def prepare_message(fields: Mapping[str, Any], strict: bool) -> Prepared:
    ignored: IgnoredFields = {}
    kept = settled(fields, MESSAGES_KNOWN, strict, ignored)
    asked = checked(MessagesRequest, kept if strict else without_hints(kept, ignored))
    if asked.thinking is not None and asked.thinking.type == "enabled":
        ignored["thinking"] = None
        if strict:
            message = "'thinking.type' = 'enabled' is not supported: how much a model thinks can't be held to."
            raise bad_value("thinking.type", message, "unsupported_parameter")
    if asked.thinking is not None:
        without_effect({"thinking.display": asked.thinking.display}, strict, ignored)
    try:
        chat = prepared_chat(as_chat(asked), ignored, strict, f"msg_{uuid.uuid4().hex}", secrets.randbits(63))
    except ApiError as error:
        raise in_words(PARAMS, error) from None
    return replace(chat, dialect=MessagesDialect, words=PARAMS)
