"""Schemas that are dear to compile: they cost a child its life, and nobody but their sender anything."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_tokenizer
from stageline_api.engine_http import GRAMMAR_MARK, REGEX_MARK, ErrorCode
from stageline_runtime.engine.errors import EngineRefusal, PromptError
from stageline_runtime.engine.guided_requests import GuidedRequests
from stageline_runtime.engine.text import schema_check
from stageline_runtime.engine.text.schema_check import SchemaCheck
from stageline_runtime.plan_bus.messages import GuideReady, PrepareGuide

DEAR = '{"type":"integer","multipleOf":399989}'
"""Half a minute of CPU, though it is well within the library's own limits."""
DEARER = '{"type":"integer","multipleOf":1999993}'
CHEAP = '{"type":"integer","multipleOf":7}'


@asynccontextmanager
async def checking(directory: Path, **options: float) -> AsyncIterator[SchemaCheck]:
    write_tiny_tokenizer(directory)
    check = SchemaCheck(directory, VOCAB_SIZE, [EOS_TOKEN_ID], **options)
    try:
        yield check
    finally:
        await check.close()


async def fault_of(check: SchemaCheck, schema: str) -> str:
    with pytest.raises(PromptError) as refused:
        await check.check(schema)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_VALUE, "response_format")
    return refused.value.message


def test_a_schema_that_is_dear_to_compile_is_given_up_and_the_next_one_served(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path) as check:
            began = time.thread_time()
            assert "takes too long to compile" in await fault_of(check, DEAR)
            assert "takes too long to compile" in await fault_of(check, DEARER)
            await check.check(CHEAP)
            assert "type" in await fault_of(check, '{"type":"nothing"}')
            spent = time.thread_time() - began
            assert spent < 1.0, f"{spent} s of the loop's CPU"

    asyncio.run(run())


HOSTILE_EXPRESSIONS = ["(a|b)*a(a|b){20}", "((a{0,1000}){0,1000}){0,1000}", "(.*a){2000}", "(a|b)*a(a|b){5000}", "("]
HOSTILE_GRAMMARS = [
    "root ::= " + "(" * 20000,
    "start: " + "(" * 20000,
    "start: " + '("a"' * 4000 + ")" * 4000,
    "start: " + " ".join(["start"] * 5000),
    "start: a{0,100000}\na: b{0,100000}\nb: /x{0,1000}/",
    "start: %regex {" + '{"substring_chars": "a"}' * 100 + "}",
]
"""For the converter, the parser and the lexer: nested, ambiguous, and counted."""


def test_a_hostile_expression_or_grammar_is_compiled_or_refused_and_the_next_one_served(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path) as check:
            began = time.thread_time()
            for text in (
                *(REGEX_MARK + each for each in HOSTILE_EXPRESSIONS),
                *(GRAMMAR_MARK + each for each in HOSTILE_GRAMMARS),
            ):
                with suppress(PromptError):
                    await check.check(text)
            await check.check(CHEAP)
            spent = time.thread_time() - began
            assert spent < 1.0, f"{spent} s of the loop's CPU"

    asyncio.run(run())


def test_a_known_schema_costs_no_child(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=0.1) as check:
            await fault_of(check, DEAR)
            await check.check(CHEAP)
            await check.close()
            assert "takes too long" in await fault_of(check, DEAR)
            await check.check(CHEAP)

    asyncio.run(run())


def test_a_client_that_leaves_while_its_schema_is_compiled_takes_the_child_with_it(tmp_path: Path) -> None:
    """The next one must not get its answer."""

    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600) as check:
            await check.check("{}")
            left = asyncio.create_task(check.check(DEARER))
            await asyncio.sleep(0)
            await until(lambda: check._turn.locked())
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert "type" in await fault_of(check, '{"type":"nothing"}')

    asyncio.run(run())


def test_more_than_may_wait_are_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "MOST_WAITING", 2)

    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600) as check:
            waiting = [asyncio.create_task(check.check(schema)) for schema in (DEAR, DEARER)]
            await until(lambda: check._num_waiting == 2)
            with pytest.raises(EngineRefusal) as refused:
                await check.check(CHEAP)
            assert refused.value.code is ErrorCode.QUEUE_FULL
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await check.check(CHEAP)

    asyncio.run(run())


def test_a_request_waits_for_the_last_stage_and_asks_it_once(tmp_path: Path) -> None:
    asked: list[PrepareGuide] = []

    async def run() -> None:
        async with checking(tmp_path) as check:
            guided = GuidedRequests(check, asked.append, lambda: True)
            waiting = asyncio.create_task(guided.prepare(CHEAP))
            await until(lambda: bool(asked))
            assert asked == [PrepareGuide(1, CHEAP)]
            assert not waiting.done()
            guided.answered(GuideReady(99))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            guided.answered(GuideReady(1))
            await waiting
            await guided.prepare(CHEAP)
            assert len(asked) == 1

    asyncio.run(run())


def test_a_group_that_does_not_serve_is_asked_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path) as check:
            asked: list[PrepareGuide] = []
            await GuidedRequests(check, asked.append, lambda: False).prepare(CHEAP)
            assert asked == []

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)
