"""A request whose guide takes long to be made: the gateway hears that it waits, and its leaving gives the guide up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from processes.scripted_core_server import ScriptedCore, says, serve, until
from stageline_api.engine_http import EngineError, ErrorCode, Finished, GenerateRequest, SamplingParams, TextPrompt
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_client.run_events import EngineEvent, EngineLostError, EngineRefusedError, LossKind
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineAddress
from stageline_runtime.engine.edge import connection_streams
from stageline_runtime.engine.errors import EngineRefusal
from stageline_runtime.engine.text.schema_check import SchemaCheck

SILENCE_SECONDS = 0.6
"""That the gateway allows."""
DEAR = '{"type":"integer","multipleOf":399989}'
"""More than a second of CPU."""
Ask = Callable[[GenerateRequest], Awaitable[list[EngineEvent]]]


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_streams, "QUEUED_WORD_SECONDS", 0.05)


def guided(schema: str = "{}", request_id: str = "r1") -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, prompt=TextPrompt(text="hello"), sampling=SamplingParams(json_schema=schema)
    )


def asking(directory: Path, use: Callable[[Ask], Awaitable[None]]) -> None:
    """Run `use` with a gateway's client of an engine."""

    async def run() -> None:
        client = EngineClient(EngineTimeouts(2.0, SILENCE_SECONDS, SILENCE_SECONDS), EngineKey())
        async with serve(ScriptedCore(says("ok")), directory) as engine:

            async def ask(request: GenerateRequest) -> list[EngineEvent]:
                seen: list[EngineEvent] = []

                def take(events: Sequence[EngineEvent]) -> None:
                    seen.extend(events)

                await client.generate(EngineAddress(str(engine.base_url).rstrip("/")), request, take)
                return seen

            try:
                await asyncio.wait_for(use(ask), 60)
            finally:
                client.close()
                await asyncio.sleep(0.01)  # closed sockets are let go of in the loop's next turns

    asyncio.run(run())


def test_a_dear_schema_is_refused_by_an_engine_that_was_never_silent(tmp_path: Path) -> None:
    async def use(ask: Ask) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineRefusedError) as refused:
            await ask(guided(DEAR))
        assert "takes too long to compile" in refused.value.error.message
        assert (refused.value.error.code, refused.value.error.param) == (ErrorCode.INVALID_VALUE, "response_format")
        assert asyncio.get_running_loop().time() - began > SILENCE_SECONDS, "it was refused too soon to tell"

    asking(tmp_path, use)


def test_a_request_that_waits_longer_than_an_engine_may_be_silent_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(_self: SchemaCheck, _schema: str) -> None:
        await asyncio.sleep(2 * SILENCE_SECONDS)

    monkeypatch.setattr(SchemaCheck, "check", check)

    async def use(ask: Ask) -> None:
        events = await ask(guided())
        assert isinstance(events[-1], Finished), events

    asking(tmp_path, use)


def test_who_waited_too_long_is_refused_and_the_engine_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(_self: SchemaCheck, _schema: str) -> None:
        await asyncio.sleep(2 * SILENCE_SECONDS)
        raise EngineRefusal(ErrorCode.NOT_READY, "Schemas wait.", 2.0)

    monkeypatch.setattr(SchemaCheck, "check", check)

    async def use(ask: Ask) -> None:
        with pytest.raises(EngineRefusedError) as refused:
            await ask(guided())
        assert refused.value.error == EngineError(
            code=ErrorCode.NOT_READY, message="Schemas wait.", retry_after_seconds=2.0
        )

    asking(tmp_path, use)


@pytest.mark.parametrize("leaves_after", [0.0, 0.3], ids=["before-it-is-told-to-wait", "while-it-waits"])
def test_a_gateway_that_leaves_has_the_guide_given_up(
    tmp_path: Path, leaves_after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[str] = []

    async def check(_self: SchemaCheck, schema: str) -> None:
        waiting.append(schema)
        try:
            await asyncio.Event().wait()
        finally:
            waiting.remove(schema)

    monkeypatch.setattr(SchemaCheck, "check", check)

    async def use(ask: Ask) -> None:
        asked = asyncio.ensure_future(ask(guided()))
        await until(lambda: bool(waiting), "it waits")
        await asyncio.sleep(leaves_after)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: not waiting, "it is given up")

    asking(tmp_path, use)


def test_a_bug_while_a_request_waits_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(_self: SchemaCheck, _schema: str) -> None:
        await asyncio.sleep(0.2)
        raise RuntimeError("a bug")

    monkeypatch.setattr(SchemaCheck, "check", check)

    async def use(ask: Ask) -> None:
        with pytest.raises(EngineLostError) as lost:
            await ask(guided())
        assert lost.value.kind is LossKind.ENGINE_FAILED
        assert "its log says why" in lost.value.message
        assert "bug" not in lost.value.message

    asking(tmp_path, use)
