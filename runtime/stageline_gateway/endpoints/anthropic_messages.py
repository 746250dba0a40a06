"""`POST /v1/messages`: Anthropic's API, answered like a chat; refusals have Anthropic's form too.

`POST /v1/messages/count_tokens` takes the same body, of which only what makes the prompt matters.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.endpoints.completions import complete
from stageline_gateway.endpoints.direct_routes import add_direct_post
from stageline_gateway.endpoints.json_answers import refuse_message
from stageline_gateway.endpoints.services import Services
from stageline_gateway.endpoints.tokenizing import Question, answer_question, counting_question
from stageline_gateway.openai_api.dialects.prepared_message import prepare_message


def add_messages(app: FastAPI, services: Services) -> None:
    async def messages(request: Request) -> Response:
        return await complete(services, prepare_message, request, refuse_message)

    async def count_tokens(request: Request) -> Response:
        strict = services.settings.strict_fields
        return await answer_question(services, request, lambda fields: _counting(fields, strict), refuse_message)

    add_direct_post(app, "/v1/messages", messages)
    app.post("/v1/messages/count_tokens")(count_tokens)


def _counting(fields: Mapping[str, Any], strict: bool) -> Question:
    # The one field that a message must have, and a count doesn't.
    prepared = prepare_message({"max_tokens": 1, **fields}, strict)
    return counting_question(prepared.generate.prompt, prepared.asked.model, prepared.ignored)
