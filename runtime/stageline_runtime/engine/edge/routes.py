"""The engine's HTTP interface for who shows its key: generation, tokenizing, drain, and what it says of itself.

A request is read, checked and tokenized here, then handed to the core; nothing unchecked passes. Long prompts and chat
templates are handled in a worker thread, so that no client slows another's tokens. The core is used from the event
loop only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from stageline_api.engine_access import is_admitted, why_unwelcome
from stageline_api.engine_http import (
    Detokenized,
    DetokenizeRequest,
    ErrorCode,
    GenerateRequest,
    Tokenized,
    TokenizeRequest,
)
from stageline_runtime.engine.core_api import AdmittedRequest, EndEvent, EngineCoreApi
from stageline_runtime.engine.edge.event_stream import EventStream
from stageline_runtime.engine.edge.http_errors import body_too_large, invalid_body, refusal_response
from stageline_runtime.engine.edge.prompt_room import PromptRoom
from stageline_runtime.engine.edge.state_routes import UnwelcomeError, add_error_answers, add_state_routes, json_answer
from stageline_runtime.engine.errors import EngineRefusal, PromptError
from stageline_runtime.engine.text.output_text import OutputStart, start_output
from stageline_runtime.engine.text.prompts import PromptReader, is_quick, size_of

logger = logging.getLogger(__name__)
Asked = TypeVar("Asked", bound=BaseModel)

MAX_BODY_BYTES = 8 * 1024 * 1024
QUICK_BODY_BYTES = 64 * 1024
"""A body of up to this many bytes is parsed in a millisecond."""
REQUEST_ID_HEADER = "X-Request-Id"
MAX_REQUEST_ID_CHARACTERS = 128
PROBES = frozenset({"/healthz", "/readyz"})
"""What a kubelet asks, which knows no key."""
LARGE = 256 * 1024
"""Characters, or ids: a prompt of as many takes about a second at worst."""
Done = TypeVar("Done")
PrepareGuide = Callable[[str], Awaitable[None]]
"""Returns once an answer can be held to a JSON schema at once; raises EngineRefusal where it can't be."""


def build_app(
    core: EngineCoreApi,
    reader: PromptReader,
    prepare_guide: PrepareGuide,
    *,
    keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The engine's application. Every answer to `/v1/generate` carries `X-Request-Id`.

    With `keys` every request but a probe must show one of them.
    """

    async def check_caller(request: Request) -> None:
        if (reason := why_unwelcome(request.headers)) is not None:
            raise UnwelcomeError(reason)
        if request.url.path not in PROBES and not is_admitted(keys, request.headers):
            raise _KeyMissingError

    app = FastAPI(title="stageline engine", openapi_url=None, dependencies=[Depends(check_caller)])
    threads = ReadingThreads()
    _add_generation(app, _Generation(core, reader, prepare_guide, threads, max_body_bytes))
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


class ReadingThreads:
    """Where prompts are read that are not quick. The threads are few, and every chat needs one for its template.

    A prompt of megabytes takes seconds to tokenize: such ones wait for each other, and nobody else for them.
    """

    def __init__(self) -> None:
        self._for_large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-prompts")

    async def run(self, size: int, work: Callable[[], Done]) -> Done:
        """`work` on so many characters or ids, off the event loop."""
        threads = self._for_large if size > LARGE else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)


class _KeyMissingError(Exception):
    """The request shows none of the engine's keys."""


def _add_generation(app: FastAPI, generation: "_Generation") -> None:
    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        return await generation.answer(request)


def _add_tokenize_routes(app: FastAPI, reader: PromptReader, threads: ReadingThreads, max_body_bytes: int) -> None:
    """A prompt as generation would read it, and ids as text; neither asks the core, so both work in any phase."""

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


class _Generation:
    def __init__(
        self,
        core: EngineCoreApi,
        reader: PromptReader,
        prepare_guide: PrepareGuide,
        threads: ReadingThreads,
        max_body_bytes: int,
    ) -> None:
        self._core = core
        self._reader = reader
        self._prepare_guide = prepare_guide
        self._max_body_bytes = max_body_bytes
        self._threads = threads
        self._prompt_room = PromptRoom()
        self._live: set[str] = set()
        """Ids of admitted requests; a second one of the same id would be aborted with the first."""

    async def answer(self, http_request: Request) -> Response:
        request_id = http_request.headers.get(REQUEST_ID_HEADER)
        try:
            body = await _read_body(http_request, self._max_body_bytes)
            if body is None:
                response = refusal_response(body_too_large(self._max_body_bytes), 413)
            else:
                request = await _parsed(GenerateRequest, body)
                request_id = request_id or request.request_id
                response = self._start(*await self._read(request))
                _log_context(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except ValidationError as error:
            response = refusal_response(invalid_body(error))
        except EngineRefusal as refusal:
            response = refusal_response(refusal)
        if request_id is not None and _is_plain(request_id):
            response.headers[REQUEST_ID_HEADER] = request_id
        return response

    async def _read(self, request: GenerateRequest) -> tuple[AdmittedRequest, OutputStart]:
        def read() -> tuple[AdmittedRequest, OutputStart]:
            admitted = self._reader.read(request)
            return admitted, start_output(self._reader.tokenizer, admitted, request.generated_characters)

        done = read() if is_quick(request) else await self._threads.run(size_of(request.prompt), read)
        if (guide := request.sampling.guide) is not None:
            await self._prepare_guide(guide)
        return done

    def _start(self, request: AdmittedRequest, start: OutputStart) -> Response:
        """Hand the request to the core. No await: between this and the stream nothing can be lost."""
        request_id = request.request_id
        if request_id in self._live:
            message = f"A request with id {request_id!r} is being answered; ids must be unique."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="request_id")
        prompt_bytes = 0 if request.prompt_told is None else self._prompt_room.take(request)

        def on_close() -> None:
            self._live.discard(request_id)
            self._prompt_room.give_back(prompt_bytes)

        stream = EventStream(self._core, start, request, on_close)
        try:
            if start.ended is None:
                self._core.submit(request, stream.take)
            else:
                stream.take(EndEvent(start.ended))
        except EngineRefusal:
            self._prompt_room.give_back(prompt_bytes)
            raise
        self._live.add(request_id)
        return stream


def _log_context(request: GenerateRequest) -> None:
    """Tie the engine's id of a request to the client's names for it, if it gave any."""
    traced = {"traceparent": request.traceparent, "tracestate": request.tracestate}
    given = "".join(f" {key}={value!r}" for key, value in traced.items() if value is not None)
    named = given or request.client_request_id is not None
    about = {"request_id": request.request_id, "client_request_id": request.client_request_id}
    logger.log(logging.INFO if named else logging.DEBUG, "request admitted%s", given, extra=about)


def _is_plain(request_id: str) -> bool:
    """Whether an id may go into a header as it is: short, printable ASCII."""
    return len(request_id) <= MAX_REQUEST_ID_CHARACTERS and request_id.isascii() and request_id.isprintable()


async def _answer_in_thread(
    request: Request,
    asked: type[Asked],
    work: Callable[[Asked], BaseModel],
    threads: ReadingThreads,
    max_body_bytes: int,
) -> Response:
    try:
        body = await _read_body(request, max_body_bytes)
        if body is None:
            return refusal_response(body_too_large(max_body_bytes), 413)
        done = await threads.run(len(body), lambda: work(asked.model_validate_json(body)).model_dump_json())
    except ClientDisconnect:
        return Response(status_code=400)
    except ValidationError as error:
        return refusal_response(invalid_body(error))
    except EngineRefusal as refusal:
        return refusal_response(refusal)
    return Response(done, media_type="application/json")


async def _parsed(asked: type[Asked], body: bytes) -> Asked:
    if len(body) <= QUICK_BODY_BYTES:
        return asked.model_validate_json(body)
    return await asyncio.to_thread(asked.model_validate_json, body)


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
