"""`POST /v1/responses`: OpenAI's newer API, answered like a chat. Nothing is stored."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.endpoints.completions import complete
from stageline_gateway.endpoints.direct_routes import add_direct_post
from stageline_gateway.endpoints.services import Services
from stageline_gateway.errors import not_stored
from stageline_gateway.openai_api.dialects.prepared_response import prepare_response


def add_responses(app: FastAPI, services: Services) -> None:
    async def responses(request: Request) -> Response:
        return await complete(services, prepare_response, request)

    add_direct_post(app, "/v1/responses", responses)

    @app.get("/v1/responses/{response}")
    @app.delete("/v1/responses/{response}")
    async def stored_response(request: Request, response: str) -> Response:  # noqa: ARG001 - part of the path
        services.admission.caller_asking(request.headers)
        raise not_stored("response")
