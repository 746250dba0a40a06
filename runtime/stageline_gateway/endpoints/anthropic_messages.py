"""`POST /v1/messages`: Anthropic's API, answered like a chat; refusals have Anthropic's form too."""

from collections.abc import Mapping

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.endpoints.completions import complete
from stageline_gateway.endpoints.direct_routes import add_direct_post
from stageline_gateway.endpoints.json_answers import JsonAnswer
from stageline_gateway.endpoints.services import Services
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.dialects.messages_events import error_body
from stageline_gateway.openai_api.dialects.prepared_message import prepare_message


def add_messages(app: FastAPI, services: Services) -> None:
    async def messages(request: Request) -> Response:
        return await complete(services, prepare_message, request, refuse)

    add_direct_post(app, "/v1/messages", messages)


def refuse(error: ApiError, headers: Mapping[str, str]) -> Response:
    return JsonAnswer(error_body(error), status_code=error.status, headers={**headers, **error.headers()})
