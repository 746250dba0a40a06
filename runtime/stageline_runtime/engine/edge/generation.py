"""A request to generate, from its validated form to the core: reads its prompt, prepares its grammar, records its id.

Both kinds of request, single and multiplexed, use this module. Long prompts and chat templates are read in a worker
thread, so that no client slows another's tokens. The core is used from the event loop only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stageline_api.engine_http import ErrorCode, GenerateRequest, UnreadableError
from stageline_runtime.engine.core_api import AdmittedRequest, EndEvent, EngineCoreApi
from stageline_runtime.engine.edge.answer_lines import AnswerLines
from stageline_runtime.engine.edge.http_errors import invalid_body
from stageline_runtime.engine.edge.prompt_room import PromptRoom
from stageline_runtime.engine.errors import EngineRefusal, PromptError
from stageline_runtime.engine.text.output_text import OutputStart, start_output
from stageline_runtime.engine.text.prompt_size import work_of
from stageline_runtime.engine.text.prompts import PromptReader, is_quick

logger = logging.getLogger(__name__)
LARGE = 64 * 1024
"""Characters, or ids: a prompt of as many takes a quarter of a second at worst."""
Done = TypeVar("Done")
PrepareGuide = Callable[[str], Awaitable[None]]
"""Returns once an answer can be held to a JSON schema at once; raises EngineRefusal where it can't be."""
ReadRequest = tuple[AdmittedRequest, OutputStart]


class ReadingThreads:
    """Threads that read prompts which are not quick: one for large prompts, one for the others, one for long bodies.

    Every chat needs a thread for its template. A prompt of megabytes takes seconds to tokenize: such prompts wait
    only for each other, and delay no others. Bodies are parsed in a separate thread, since later lines of a
    connection are read only once they are parsed. More threads would not help, because parsing and templates are
    Python code: only one thread runs at a time, and each makes the event loop wait for the interpreter lock once
    more between two tokens.
    """

    def __init__(self) -> None:
        self._for_large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-prompts")
        self._for_rest = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._for_bodies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")

    async def run(self, size: int, work: Callable[[], Done]) -> Done:
        """Run `work`, which costs `size` characters or ids, off the event loop."""
        threads = self._for_large if size > LARGE else self._for_rest
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def parse(self, work: Callable[[], Done]) -> Done:
        """`work` on a long body, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._for_bodies, work)


def parse_request(written: bytes) -> GenerateRequest:
    """Raises EngineRefusal."""
    try:
        return GenerateRequest.from_json(written)
    except UnreadableError as error:
        raise invalid_body(error, written) from None


class Generation:
    """One for all of an engine's requests."""

    def __init__(
        self, core: EngineCoreApi, reader: PromptReader, prepare_guide: PrepareGuide, threads: ReadingThreads
    ) -> None:
        self._core = core
        self._reader = reader
        self._prepare_guide = prepare_guide
        self._threads = threads
        self._prompt_room = PromptRoom()
        self._live: set[str] = set()
        """Ids of admitted requests; a second one of the same id would be aborted with the first."""

    async def parse(self, written: bytes) -> GenerateRequest:
        """A long request, off the event loop. Raises EngineRefusal."""
        return await self._threads.parse(lambda: parse_request(written))

    def read_at_once(self, request: GenerateRequest) -> ReadRequest | None:
        """The request as the core accepts it; None if parsing it is slow or has to wait: use `read` then.

        Raises:
            EngineRefusal: it can't be served.
        """
        return self._read(request) if is_quick(request) and request.sampling.guide is None else None

    async def read(self, request: GenerateRequest) -> ReadRequest:
        """The request as the core accepts it, with its grammar ready.

        Raises:
            EngineRefusal: it can't be served, or not now.
        """
        if is_quick(request):
            done = self._read(request)
        else:
            done = await self._threads.run(work_of(request.prompt, LARGE), lambda: self._read(request))
        if (guide := request.sampling.guide) is not None:
            await self._prepare_guide(guide)
        return done

    def start(self, asked: GenerateRequest, read: ReadRequest, wake: Callable[[], None]) -> AnswerLines:
        """Submit the request to the core. No await: until the caller is ready to close the answer, nothing can be
        lost.

        Raises:
            EngineRefusal: its id is in use, or the core or the budget for prompt reports doesn't accept it now.
        """
        request, start = read
        request_id = request.request_id
        if request_id in self._live:
            message = f"A request with id {request_id!r} is being answered; ids must be unique."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="request_id")
        prompt_bytes = 0 if request.prompt_told is None else self._prompt_room.take(request)

        def on_close() -> None:
            self._live.discard(request_id)
            self._prompt_room.give_back(prompt_bytes)

        answer = AnswerLines(self._core, start, request, wake=wake, on_close=on_close)
        try:
            if start.ended is None:
                self._core.submit(request, answer.take)
                answer.submitted()
            else:
                answer.take(EndEvent(start.ended))
        except EngineRefusal:
            self._prompt_room.give_back(prompt_bytes)
            raise
        self._live.add(request_id)
        _log_context(asked)
        return answer

    def _read(self, request: GenerateRequest) -> ReadRequest:
        admitted = self._reader.read(request)
        return admitted, start_output(self._reader.tokenizer, admitted, request.generated_characters)


def _log_context(request: GenerateRequest) -> None:
    """Tie the engine's id of a request to the client's names for it, if it gave any."""
    traced = {"traceparent": request.traceparent, "tracestate": request.tracestate}
    given = "".join(f" {key}={value!r}" for key, value in traced.items() if value is not None)
    named = given or request.client_request_id is not None
    about = {"request_id": request.request_id, "client_request_id": request.client_request_id}
    logger.log(logging.INFO if named else logging.DEBUG, "request admitted%s", given, extra=about)
