"""`POST /v1/responses`: OpenAI's newer API, answered like a chat. Nothing is stored."""

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.endpoints.completions import Prepared, complete, prepared_chat
from stageline_gateway.endpoints.services import Services
from stageline_gateway.errors import ApiError, not_stored
from stageline_gateway.openai_api.answer_shapes import Stamp
from stageline_gateway.openai_api.responses_events import ResponsesDialect
from stageline_gateway.openai_api.responses_request import (
    ITEM_IGNORED,
    ITEM_REPEATED,
    PARAMS,
    PART_IGNORED,
    RESPONSES_KNOWN,
    ResponsesRequest,
    as_chat,
    fields_without_effect,
    without_repeated,
)
from stageline_gateway.openai_api.validation import IgnoredFields, checked, in_words, settled, without_effect


def add_responses(app: FastAPI, services: Services) -> None:
    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await complete(services, prepare_response, request)

    @app.get("/v1/responses/{response}")
    @app.delete("/v1/responses/{response}")
    async def stored_response(request: Request, response: str) -> Response:  # noqa: ARG001 - part of the path
        services.admission.caller_asking(request.headers)
        raise not_stored("response")


def prepare_response(fields: Mapping[str, Any], strict: bool) -> Prepared:
    ignored: IgnoredFields = {}
    kept = settled(fields, RESPONSES_KNOWN, strict, ignored)
    # What an answer from here has in its items asks for nothing when it comes back, also where that is strict.
    kept["input"] = without_repeated(kept.get("input"), ITEM_REPEATED if strict else ITEM_IGNORED, PART_IGNORED)
    asked = checked(ResponsesRequest, kept)
    without_effect(fields_without_effect(asked), strict, ignored)
    try:
        chat = prepared_chat(as_chat(asked), ignored, strict, f"resp_{uuid.uuid4().hex}", secrets.randbits(63))
    except ApiError as error:
        raise in_words(PARAMS, error) from None

    def dialect(stamp: Stamp) -> ResponsesDialect:
        return ResponsesDialect(asked, stamp)

    return replace(chat, dialect=dialect, words=PARAMS)
