"""One request at vLLM: sent over its own connection, its tokens delivered as they arrive, its end reported.

The task that runs it sleeps between tokens. Cancelling that task closes the connection, which aborts the request
inside vLLM. Exactly one end is delivered, or none if the request was aborted, since its stream has ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from stageline_runtime.engine.answer_streams import AnswerStreams
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.scheduling.row_selection import FirstRow
from stageline_runtime.engine.scheduling.scheduler import NewToken, ReportedPrompt
from stageline_runtime.engine.telemetry.metrics import GROUP_LOST, GUIDE, REFUSED
from stageline_runtime.guided.grammar_walk import GrammarWalk, WalkMaker
from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars
from stageline_vllm.engine.answer_progress import AnswerProgress, NotFollowedError
from stageline_vllm.engine.generate_words import (
    GENERATE_PATH,
    VllmAnswerError,
    generate_body,
    read_event,
    refusal_of,
    warm_up_body,
)
from stageline_vllm.engine.grammar_words import WorkersGrammars, grammar_body, is_compiled
from stageline_vllm.engine.prompt_words import asks_for_prompt, prompt_body, read_prompt
from stageline_vllm.engine.vllm_exchange import VllmExchange, VllmUnreachableError
from stageline_vllm.server_key import authorization

logger = logging.getLogger(__name__)

GUIDE_LOST = "The answer can't be guided any further"


@dataclass(frozen=True, slots=True)
class VllmServer:
    """The address of vLLM's server, its key, and the model data that a request needs."""

    host: str
    port: int
    key: str = field(repr=False)
    eos_token_ids: frozenset[int]
    grammars: JsonGrammars

    async def open(self, take_line: Callable[[int, bytes], None]) -> VllmExchange:
        """A connection to it. Raises VllmUnreachableError if the server doesn't accept it."""
        return await VllmExchange.open(self.host, self.port, take_line)

    def ask(self, exchange: VllmExchange, body: bytes) -> None:
        """Have it generate, on a connection of its own."""
        exchange.post(self.host, GENERATE_PATH, authorization(self.key), body)


GRAMMAR_LIMIT_SECONDS: Final = 60.0
"""For which an answer waits for compilers, which others may keep busy."""


class Generation:
    """A request from when it is handed to vLLM to its end. Used on the engine's event loop."""

    def __init__(
        self,
        request: AdmittedRequest,
        number: int,
        server: VllmServer,
        walks: WalkMaker[GrammarWalk],
        workers_grammars: WorkersGrammars,
        streams: AnswerStreams,
        on_event: Callable[[], None],
        on_grammar: Callable[[], None],
    ) -> None:
        """`walks` are through the server's grammars; `on_event` is called for each event that vLLM sends, `on_grammar`
        once its own grammar is compiled everywhere."""
        self.request = request
        self.number = number
        self._server = server
        self._walks = walks
        self._workers_grammars = workers_grammars
        self._streams = streams
        self._on_event = on_event
        self._on_grammar = on_grammar
        schema = request.sampling.json_schema
        self.awaits_grammar = schema is not None and workers_grammars.is_new(schema)
        """Whether the request waits for its grammar's compilation first, and holds one of vLLM's places during it."""
        self._is_over = False
        self._has_begun = False
        self._refusal: list[bytes] = []
        self._progress: AnswerProgress | None = None
        self._exchange: VllmExchange | None = None

    async def run(self) -> None:
        """Send the request to vLLM and deliver its answer. Raises only its own cancellation."""
        try:
            await self._ask()
        except (VllmUnreachableError, VllmAnswerError) as error:
            self._fail(f"The group could not finish this answer: {error}.", GROUP_LOST)
        except TimeoutError:
            # Final, since the group is healthy, and retries elsewhere would fail the same way.
            self._fail(f"Its grammar was not compiled within {GRAMMAR_LIMIT_SECONDS:g} s.", GUIDE, is_final=True)
        except (NotFollowedError, GrammarError) as error:
            self._fail(f"{GUIDE_LOST}: {error}.", GUIDE, is_final=True)
        except Exception:
            logger.exception("a request failed at vLLM", extra={"request_id": self.request.request_id})
            self._fail("The engine failed while it generated this answer; its log says why.", GROUP_LOST)
        finally:
            self._is_over = True
            if self._exchange is not None:
                self._exchange.close()

    def leave(self) -> None:
        """Deliver no more events: the client has left."""
        self._is_over = True

    async def _ask(self) -> None:
        self._progress = await self._begin()
        if self.awaits_grammar:
            self.awaits_grammar = False
            self._on_grammar()
        if asks_for_prompt(self.request) and not self._is_over:
            await self._ask_about_prompt()
        if self._is_over:
            return
        exchange = await self._open(self._take_line)
        self._server.ask(exchange, generate_body(self.request, self.number, self._server.eos_token_ids))
        status = await exchange.ended()
        if status != HTTPStatus.OK:
            self._refused(status)
            return
        self._finish()

    async def _open(self, take_line: Callable[[int, bytes], None]) -> VllmExchange:
        exchange = self._exchange = await self._server.open(take_line)
        if not self._has_begun:
            self._has_begun = True
            # Prefix-cache figures come from vLLM, for all requests together.
            self._streams.started([FirstRow(self.request.request_id, 0, 0)])
        return exchange

    async def _ask_about_prompt(self) -> None:
        """Deliver log probabilities of the prompt; they are the whole answer of a request without output."""
        lines = await self._ask_aside(prompt_body(self.request, self.number))
        if self._is_over:
            return
        # Parsing the report of a long prompt takes a tenth of a second.
        report, drawn = await asyncio.to_thread(read_prompt, lines, self.request)
        if self._is_over:
            return
        name = self.request.request_id
        self._streams.tell_prompt(ReportedPrompt(name, report))
        if self.request.is_prompt_only:
            self._is_over = True
            self._streams.deliver(NewToken(name, drawn, finished=True, stopped=False))

    async def _ask_for_grammar(self) -> None:
        """Wait until vLLM's worker has compiled the grammar.

        Raises TimeoutError if the worker keeps answering for too long that it has not. The time until vLLM sends such
        an answer counts as any wait for vLLM.
        """
        body = grammar_body(self.request, self.number, self._server.eos_token_ids)
        until: float | None = None
        while True:
            lines = await self._ask_aside(body)
            if self._is_over or is_compiled(lines):
                return
            now = time.monotonic()
            until = now + GRAMMAR_LIMIT_SECONDS if until is None else until
            if now >= until:
                raise TimeoutError

    async def _ask_aside(self, body: bytes) -> list[bytes]:
        """vLLM's answer to an unstreamed request; if vLLM refuses it, this request has ended."""
        lines: list[bytes] = []
        exchange = await self._open(lambda _status, line: lines.append(line))
        self._server.ask(exchange, body)
        status = await exchange.ended()
        exchange.close()
        self._on_event()
        if status != HTTPStatus.OK:
            self._refusal = lines
            self._refused(status)
        return lines

    async def _begin(self) -> AnswerProgress:
        """Its progress, once both sides have compiled its grammar."""
        schema = self.request.sampling.json_schema
        if schema is None:
            return AnswerProgress(self.request)
        grammar = self._walks.start(schema)
        async with asyncio.timeout(GRAMMAR_LIMIT_SECONDS):
            await asyncio.wrap_future(grammar.compiled)
        number = self._workers_grammars.begin()
        if not self._workers_grammars.surely_has(schema):
            await self._ask_for_grammar()
        if not self._is_over:
            self._workers_grammars.used(schema, number)
        return AnswerProgress(self.request, grammar, self._server.grammars.foreign_token)

    def _take_line(self, status: int, line: bytes) -> None:
        if self._is_over:
            return
        if status != HTTPStatus.OK:
            self._refusal.append(line)
            return
        assert self._progress is not None
        self._on_event()
        event = read_event(line)
        if event is None:
            self._finish()
            return
        for token in self._progress.take(event):
            if not self._is_over:
                self._streams.deliver(token)
        last = self._progress.end()
        if last is not None and (last.failure is not None or event.usage is not None):
            self._finish()

    def _finish(self) -> None:
        if self._is_over:
            return
        assert self._progress is not None
        last = self._progress.end()
        if last is None:
            raise VllmAnswerError("vLLM stopped before the answer's end")
        self._is_over = True
        # The prompt request left the prompt in the cache, but that saved no computation.
        if self._progress.cached_tokens is not None and not asks_for_prompt(self.request):
            self._streams.found_cached(self.request.request_id, self._progress.cached_tokens)
        self._streams.deliver(last)
        if self._exchange is not None:
            self._exchange.finish()

    def _refused(self, status: int) -> None:
        """Fail the request. It is final if vLLM refused the request itself; otherwise another group may accept it."""
        refusal = refusal_of(status, self._refusal)
        if refusal.is_about_request:
            self._fail(f"vLLM refused this request {refusal.words}", REFUSED, is_final=True)
        else:
            self._fail(f"The group could not finish this answer: vLLM failed {refusal.words}", GROUP_LOST)

    def _fail(self, message: str, reason: str, *, is_final: bool = False) -> None:
        if not self._is_over:
            self._is_over = True
            self._streams.fail(self.request.request_id, message, reason, is_final=is_final)


async def generate_one_token(server: VllmServer) -> None:
    """Have vLLM compute one token through all stages and discard it.

    Raises:
        VllmUnreachableError: its server can't be reached, or closes the connection early.
        VllmAnswerError: it refuses, or fails.
    """
    lines: list[bytes] = []
    exchange = await server.open(lambda _status, line: lines.append(line))
    try:
        server.ask(exchange, warm_up_body(server.eos_token_ids))
        status = await exchange.ended()
    finally:
        exchange.close()
    if status != HTTPStatus.OK:
        raise VllmAnswerError(f"vLLM refused a request of one token {refusal_of(status, lines).words}")
    events = [event for line in lines if (event := read_event(line)) is not None]
    failed = next((event.error for event in events if event.error is not None), None)
    if failed is not None or not any(choice.token_ids for event in events for choice in event.choices):
        words = "it gave none" if failed is None else failed.message
        raise VllmAnswerError(f"vLLM was asked for one token: {words}")
