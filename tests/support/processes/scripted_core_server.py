"""An engine server on a loopback port over a core that plays a script: what the HTTP edge is tested against.

The server is the real one, uvicorn included; only the tokens are made up, by a function of the admitted request.
"""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import ErrorCode, FinishReason, HeldPrefixes, ModelInfo
from stageline_api.health import EngineStatus, Phase
from stageline_api.telemetry.timeline import GroupClocks, GroupStages
from stageline_runtime.engine.core_api import (
    AdmittedRequest,
    AnswerSink,
    CoreEvent,
    EndEvent,
    EngineRefusal,
    FailEvent,
    TokenEvent,
)
from stageline_runtime.engine.edge.http_server import server_settings
from stageline_runtime.engine.edge.multiplexed import MultiplexedConnections
from stageline_runtime.engine.edge.routes import build_app
from stageline_runtime.engine.edge.state_routes import build_state_app
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.engine.text.schema_check import SchemaCheck

FIRST_BYTE_ID = 4
EOS_TOKEN_ID = 1
VOCAB_SIZE = 260
MAX_MODEL_LEN = 60_000
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

"""Of HTTP: `auto` takes the faster one where it is installed."""
Script = Callable[[AdmittedRequest], AsyncGenerator[CoreEvent]]


def ids_of(text: str) -> tuple[int, ...]:
    """One token per byte of `text`."""
    return tuple(FIRST_BYTE_ID + byte for byte in text.encode())


def says(text: str, *, tokens_per_event: int = 1, reason: FinishReason = FinishReason.STOP) -> Script:
    """A script that generates `text`, then end-of-sequence when it stops by itself."""
    token_ids = ids_of(text) + ((EOS_TOKEN_ID,) if reason is FinishReason.STOP else ())

    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        for start in range(0, len(token_ids), tokens_per_event):
            await asyncio.sleep(0)
            yield TokenEvent(token_ids[start : start + tokens_per_event])
        yield EndEvent(reason)

    return play


async def says_forever(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
    """A script that ends only by being dropped."""
    while True:
        await asyncio.sleep(0.001)
        yield TokenEvent(ids_of("x"))


async def says_nothing(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
    """A script of a request that waits in the queue for ever."""
    await asyncio.Event().wait()
    yield EndEvent(FinishReason.ABORT)


@dataclass
class ScriptedCore:
    """An `EngineCoreApi` that records what the edge asks of it; a script that breaks fails its request and says why."""

    script: Script
    phase: Phase = Phase.READY
    submitted: list[AdmittedRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    held: tuple[str, ...] = ()
    """Names of beginnings of prompts that its cache holds."""
    steps: int | None = None
    """Steps that it says it has begun while a request waits."""
    times_asked_for_steps: int = 0
    abort_reasons: list[FinishReason] = field(default_factory=list)

    _playing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def submit(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        if self.phase is Phase.DRAINING:
            raise EngineRefusal(ErrorCode.DRAINING, "The engine is draining.", 1.2)
        if self.phase is not Phase.READY:
            raise EngineRefusal(ErrorCode.NOT_READY, f"The engine is {self.phase}.", 5.0)
        self.submitted.append(request)
        self._playing[request.request_id] = asyncio.create_task(self._play(request, sink))

    async def _play(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        try:
            async with aclosing(self.script(request)) as events:
                async for event in events:
                    sink(event)
        except asyncio.CancelledError:
            sink(EndEvent(self.abort_reasons[-1]))
            raise
        except Exception as error:
            sink(FailEvent(f"the script broke: {error!r}"))
        finally:
            del self._playing[request.request_id]

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted.append(request_id)
        self.abort_reasons.append(reason)
        if (playing := self._playing.get(request_id)) is not None:
            playing.cancel()

    def steps_while_queued(self, _request_id: str) -> int | None:
        self.times_asked_for_steps += 1
        return self.steps

    def status(self) -> EngineStatus:
        return EngineStatus(phase=self.phase, served_name="tiny", max_model_len=MAX_MODEL_LEN)

    def held_prefixes(self) -> HeldPrefixes:
        return HeldPrefixes(keys=self.held)

    def info(self) -> ModelInfo:
        return ModelInfo(
            served_name="tiny", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,)
        )

    def start_drain(self) -> None:
        self.phase = Phase.DRAINING

    def metrics_page(self, accept: str = "") -> tuple[bytes, str]:
        return (
            b"# HELP stageline_test A number.\n# TYPE stageline_test gauge\nstageline_test 7.0\n",
            f"text/plain; version=0.0.4; asked={accept}",
        )


@asynccontextmanager
async def serve(
    core: ScriptedCore,
    directory: Path,
    *,
    max_body_bytes: int = 200_000,
    keys: Sequence[str] = (),
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve `core` until the block ends; gives a client of the server, which shows no key."""
    write_byte_level(directory, chat_template=TEMPLATE)
    reader = PromptReader.load(
        directory, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=[EOS_TOKEN_ID]
    )
    schemas = SchemaCheck(directory, VOCAB_SIZE, [EOS_TOKEN_ID])
    connections = MultiplexedConnections()
    app = build_app(core, reader, schemas.check, connections, keys=keys, max_body_bytes=max_body_bytes)
    try:
        async with _served(app, connections.leave) as client:
            yield client
    finally:
        await schemas.close()


@asynccontextmanager
async def serve_state(core: ScriptedCore) -> AsyncIterator[httpx.AsyncClient]:
    """Serve what `core` says of itself until the block ends, as on the port that asks for no key."""
    stages = GroupStages(served_name="tiny", stage_count=1, incarnation=1, stages=())
    async with _served(build_state_app(core, lambda: stages, lambda: GroupClocks(stages=())), lambda: None) as client:
        yield client


@asynccontextmanager
async def _served(app: FastAPI, before_end: Callable[[], None]) -> AsyncIterator[httpx.AsyncClient]:
    server = uvicorn.Server(server_settings(app, linger_seconds=5))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # Connections inherit it: a client that doesn't read fills a small buffer soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started, "the server starts")
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                yield client
        finally:
            before_end()
            server.should_exit = True
            await task


async def until(condition: Callable[[], bool], what: str, within_seconds: float = 60.0) -> None:
    """Wait for `condition`; fails naming `what` after `within_seconds`."""
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        await asyncio.sleep(0.005)
