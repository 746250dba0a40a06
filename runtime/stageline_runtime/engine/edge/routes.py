"""The engine's HTTP interface for clients with a key: generation, tokenizing, drain, and its state.

Bodies are read and validated here; `generation` handles the requests to generate.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Depends, FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from stageline_api.engine_access import is_admitted, why_unwelcome
from stageline_api.engine_http import (
    Detokenized,
    DetokenizeRequest,
    ErrorCode,
    Tokenized,
    TokenizeRequest,
    UnreadableError,
    Wire,
)
from stageline_api.multiplexing import MOST_LINE_BYTES, MULTIPLEXED_PATH
from stageline_runtime.engine.core_api import EngineCoreApi
from stageline_runtime.engine.edge.event_stream import EventStream
from stageline_runtime.engine.edge.generation import Generation, PrepareGuide, ReadingThreads
from stageline_runtime.engine.edge.http_errors import body_too_large, invalid_body, refusal_response
from stageline_runtime.engine.edge.multiplexed import MultiplexedAnswers, MultiplexedConnections
from stageline_runtime.engine.edge.state_routes import (
    UnwelcomeError,
    add_error_answers,
    add_state_routes,
    json_answer,
)
from stageline_runtime.engine.errors import EngineRefusal
from stageline_runtime.engine.text.prompts import PromptReader

Asked = TypeVar("Asked", bound=Wire)

MAX_BODY_BYTES = MOST_LINE_BYTES
REQUEST_ID_HEADER = "X-Request-Id"
MAX_REQUEST_ID_CHARACTERS = 128
PROBES = frozenset({"/healthz", "/readyz"})
"""Paths of the kubelet's probes, which carry no key."""


def build_app(
    core: EngineCoreApi,
    reader: PromptReader,
    prepare_guide: PrepareGuide,
    connections: MultiplexedConnections,
    *,
    keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The engine's application. Every answer to `/v1/generate` carries `X-Request-Id`.

    With `keys` every request except a probe must carry one of them. The server that runs it lets `connections`
    leave at the end.
    """

    async def check_caller(request: Request) -> None:
        if (reason := why_unwelcome(request.headers)) is not None:
            raise UnwelcomeError(reason)
        if request.url.path not in PROBES and not is_admitted(keys, request.headers):
            raise _KeyMissingError

    app = FastAPI(title="stageline engine", openapi_url=None, dependencies=[Depends(check_caller)])
    threads = ReadingThreads()
    generation = Generation(core, reader, prepare_guide, threads)
    _add_generation(app, _GenerateRoute(generation, max_body_bytes))
    _add_multiplexed(app, generation, connections)
    _add_tokenize_routes(app, reader, threads, max_body_bytes)
    add_state_routes(app, core)
    _add_rest(app, core)
    add_error_answers(app)

    @app.exception_handler(_KeyMissingError)
    async def answer_without_key(_request: Request, _error: Exception) -> Response:
        message = "This engine answers only to who shows one of its keys, as 'Authorization: Bearer KEY'."
        response = refusal_response(EngineRefusal(ErrorCode.KEY_MISSING, message))
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    return app


class _KeyMissingError(Exception):
    """The request shows none of the engine's keys."""


def _add_generation(app: FastAPI, route: "_GenerateRoute") -> None:
    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        return await route.answer(request)


def _add_multiplexed(app: FastAPI, generation: Generation, connections: MultiplexedConnections) -> None:
    @app.post(MULTIPLEXED_PATH)
    async def multiplexed(_request: Request) -> Response:
        return MultiplexedAnswers(generation, connections)


def _add_tokenize_routes(app: FastAPI, reader: PromptReader, threads: ReadingThreads, max_body_bytes: int) -> None:
    """Routes that tokenize a prompt as generation does, and decode ids; neither uses the core, so both work in any
    phase."""

    def tokenize(asked: TokenizeRequest) -> Tokenized:
        token_ids = reader.tokenize(asked.prompt, asked.add_special_tokens)
        texts = tuple(reader.tokenizer.token_text(index) for index in token_ids) if asked.with_texts else None
        return Tokenized(token_ids=token_ids, max_model_len=reader.max_model_len, texts=texts)

    def detokenize(asked: DetokenizeRequest) -> Detokenized:
        return Detokenized(text=reader.detokenize(asked.token_ids))

    @app.post("/v1/tokenize")
    async def answer_tokenize(request: Request) -> Response:
        return await _answer_in_thread(request, TokenizeRequest, tokenize, threads, max_body_bytes)

    @app.post("/v1/detokenize")
    async def answer_detokenize(request: Request) -> Response:
        return await _answer_in_thread(request, DetokenizeRequest, detokenize, threads, max_body_bytes)


def _add_rest(app: FastAPI, core: EngineCoreApi) -> None:
    @app.get("/v1/prefixes")
    async def prefixes() -> Response:
        return json_answer(core.held_prefixes())

    @app.get("/v1/info")
    async def info() -> Response:
        return json_answer(core.info())

    @app.post("/v1/drain")
    async def drain() -> Response:
        core.start_drain()
        return json_answer(core.status(), 202)


class _GenerateRoute:
    """A single request, for people who debug an engine: its refusal is a status, its id is echoed."""

    def __init__(self, generation: Generation, max_body_bytes: int) -> None:
        self._generation = generation
        self._max_body_bytes = max_body_bytes

    async def answer(self, http_request: Request) -> Response:
        request_id = http_request.headers.get(REQUEST_ID_HEADER)
        filled = asyncio.Event()
        try:
            body = await _read_body(http_request, self._max_body_bytes)
            if body is None:
                response = refusal_response(body_too_large(self._max_body_bytes), 413)
            else:
                request = await self._generation.parse(body)
                request_id = request_id or request.request_id
                read = await self._generation.read(request)
                response = EventStream(self._generation.start(request, read, filled.set), filled)
        except ClientDisconnect:
            return Response(status_code=400)
        except EngineRefusal as refusal:
            response = refusal_response(refusal)
        if request_id is not None and _is_plain(request_id):
            response.headers[REQUEST_ID_HEADER] = request_id
        return response


def _is_plain(request_id: str) -> bool:
    """Whether an id may be copied into a header: short, printable ASCII."""
    return len(request_id) <= MAX_REQUEST_ID_CHARACTERS and request_id.isascii() and request_id.isprintable()


async def _answer_in_thread(
    request: Request,
    asked: type[Asked],
    work: Callable[[Asked], Wire],
    threads: ReadingThreads,
    max_body_bytes: int,
) -> Response:
    try:
        body = await _read_body(request, max_body_bytes)
        if body is None:
            return refusal_response(body_too_large(max_body_bytes), 413)
        done = await threads.run(len(body), lambda: work(asked.from_json(body)).to_json())
    except ClientDisconnect:
        return Response(status_code=400)
    except UnreadableError as error:
        return refusal_response(invalid_body(error, body or b""))
    except EngineRefusal as refusal:
        return refusal_response(refusal)
    return Response(done, media_type="application/json")


async def _read_body(http_request: Request, max_body_bytes: int) -> bytes | None:
    """The whole body, or None when it is larger than allowed (the rest isn't read).

    Raises:
        ClientDisconnect: starlette's; the client left while sending.
    """
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in http_request.stream():
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > max_body_bytes:
            return None
    return b"".join(chunks)
