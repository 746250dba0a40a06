"""`POST /v1/tokenize` and `POST /v1/detokenize`: a prompt as generation would read it, and ids as text.

Both run in a worker thread, so that a long prompt delays no token, and neither asks the core: they work in any phase.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from stageline_api.engine_http import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from stageline_runtime.engine.edge.http_errors import body_too_large, invalid_body, refusal_response
from stageline_runtime.engine.edge.request_body import read_body
from stageline_runtime.engine.errors import EngineRefusal
from stageline_runtime.engine.text.prompts import PromptReader

Asked = TypeVar("Asked", bound=BaseModel)


def add_tokenize_routes(app: FastAPI, reader: PromptReader, max_body_bytes: int) -> None:
    """Add both routes."""

    def tokenize(asked: TokenizeRequest) -> Tokenized:
        token_ids = reader.tokenize(asked.prompt, asked.add_special_tokens)
        texts = tuple(reader.tokenizer.token_text(index) for index in token_ids) if asked.with_texts else None
        return Tokenized(token_ids=token_ids, max_model_len=reader.max_model_len, texts=texts)

    def detokenize(asked: DetokenizeRequest) -> Detokenized:
        return Detokenized(text=reader.detokenize(asked.token_ids))

    @app.post("/v1/tokenize")
    async def answer_tokenize(request: Request) -> Response:
        return await _answer(request, TokenizeRequest, tokenize, max_body_bytes)

    @app.post("/v1/detokenize")
    async def answer_detokenize(request: Request) -> Response:
        return await _answer(request, DetokenizeRequest, detokenize, max_body_bytes)


async def _answer(
    request: Request, asked: type[Asked], work: Callable[[Asked], BaseModel], max_body_bytes: int
) -> Response:
    try:
        body = await read_body(request, max_body_bytes)
        if body is None:
            return refusal_response(body_too_large(max_body_bytes), 413)
        done = await asyncio.to_thread(work, asked.model_validate_json(body))
    except ClientDisconnect:
        return Response(status_code=400)
    except ValidationError as error:
        return refusal_response(invalid_body(error))
    except EngineRefusal as refusal:
        return refusal_response(refusal)
    return Response(done.model_dump_json(), media_type="application/json")
