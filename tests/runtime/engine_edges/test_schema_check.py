"""Schemas that are dear to compile: they cost a child its life, and nobody but their sender anything."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_tokenizer
from processes.cpu_bounds import CpuBound
from processes.process_costs import most_resident_bytes
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
LOOP_SECONDS = 0.5
"""Of CPU, in which children are started too; compiled here, each of the dear ones would take half a minute."""
MOST_FORK_BYTES = 384 * 1024 * 1024
"""In the CPU time that it has it takes a third of that, in twelve times as much 550 MiB."""


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


def test_a_schema_that_is_dear_to_compile_is_given_up_and_the_next_one_served(
    tmp_path: Path, cpu_bound: CpuBound
) -> None:
    async def run() -> None:
        async with checking(tmp_path) as check:
            with most_of_dear_forks(check) as most:
                began = time.thread_time()
                assert "takes too long to compile" in await fault_of(check, DEAR)
                assert "takes too long to compile" in await fault_of(check, DEARER)
                await check.check(CHEAP)
                assert "type" in await fault_of(check, '{"type":"nothing"}')
                spent = time.thread_time() - began
            assert cpu_bound.holds(spent, LOOP_SECONDS), f"{spent} s of the loop's CPU"
            assert 0 < most.bytes < MOST_FORK_BYTES, f"a fork held {most.bytes} bytes"

    asyncio.run(run())


@dataclass
class Most:
    bytes: int = 0


@contextmanager
def most_of_dear_forks(check: SchemaCheck) -> Iterator[Most]:
    """The most memory that a process which compiles a dear schema has, looked at now and then."""
    most, is_over = Most(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            if (child := check._dear._child) is not None:
                forks = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
                with suppress(OSError, AssertionError):  # it has ended meanwhile
                    most.bytes = max(most.bytes, *(most_resident_bytes(int(fork)) for fork in forks), 0)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield most
        finally:
            is_over.set()
    watching.result()


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


def test_a_hostile_expression_or_grammar_is_compiled_or_refused_and_the_next_one_served(
    tmp_path: Path, cpu_bound: CpuBound
) -> None:
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
            assert cpu_bound.holds(spent, LOOP_SECONDS), f"{spent} s of the loop's CPU"

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


def test_a_client_that_leaves_while_its_schema_is_compiled_has_it_given_up(tmp_path: Path) -> None:
    """The next one must not get its answer, nor wait for a child to start."""

    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600) as check:
            await check.check("{}")
            left = asyncio.create_task(check.check(DEARER))
            await until(lambda: check._dear.num_turns == 1)
            await leave(left)
            await until(lambda: check._dear.num_waiting == 0)
            other = asyncio.create_task(check.check(DEAR))
            await until(lambda: check._dear.num_turns == 2)
            children = [check._quick._child, check._dear._child]
            await leave(other)
            assert "type" in await fault_of(check, '{"type":"nothing"}')
            assert [check._quick._child, check._dear._child] == children
            assert all(child is not None and child.returncode is None for child in children)

    asyncio.run(run())


def test_a_child_starts_for_the_next_one_when_who_wanted_it_has_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path) as check:
            left = asyncio.create_task(check.check(DEAR))
            await until(lambda: check._quick._starting is not None)
            await leave(left)
            starting = check._quick._starting
            await check.check(CHEAP)
            assert check._quick._starting is starting
            assert check._quick.num_turns == 1

    asyncio.run(run())


def test_clients_that_leave_free_the_line(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path) as check:
            await check.check("{}")
            await leave(*(asyncio.create_task(check.check(schema)) for schema in poison(30)))
            waiting = [asyncio.create_task(check.check(schema)) for schema in poison(30)]
            await until(lambda: check._quick.num_waiting == 30)
            await leave(*waiting)
            await until(lambda: check._quick.num_waiting == check._dear.num_waiting == 0)
            turns = check._quick.num_turns
            await check.check(CHEAP)
            assert check._quick.num_turns == turns + 1
            assert turns < 10, f"{turns} of 60 that left had a turn"

    asyncio.run(run())


def test_a_cheap_schema_waits_for_no_more_than_the_short_turns_of_dear_ones(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600) as check:
            waiting = [asyncio.create_task(check.check(schema)) for schema in poison(8)]
            await until(lambda: check._quick.num_waiting == 8)
            await check.check(CHEAP)
            assert check._quick.num_turns == 9
            assert sum(one.done() for one in waiting) < 4, "the dear ones wait on, for each other"
            await check.check('{"type":"integer","multipleOf":11}')
            assert check._quick.num_turns == 10, "it waits for nobody"
            await leave(*waiting)

    asyncio.run(run())


def test_requests_with_one_schema_share_its_turn_until_the_last_has_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=0.5) as check:
            first, second, third = (asyncio.create_task(fault_of(check, DEAR)) for _ in range(3))
            await until(lambda: check._dear.num_turns == 1)
            await leave(first)
            assert "takes too long" in await second
            assert "takes too long" in await third
            assert (check._quick.num_turns, check._dear.num_turns) == (1, 1)

    asyncio.run(run())


def test_who_has_waited_for_too_long_is_told_for_what(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600, wait_limit_seconds=1.0) as check:
            waiting = [asyncio.create_task(check.check(schema)) for schema in (DEARER, REGEX_MARK + "(a|b)*a(a|b){20}")]
            with pytest.raises(EngineRefusal, match=r"JSON schema could not be compiled within 1 s: \d JSON schemas"):
                await check.check(DEAR)
            await asyncio.gather(*waiting, return_exceptions=True)
            await until(lambda: check._quick.num_waiting == check._dear.num_waiting == 0)
            refused = waiting[0].exception()
            assert isinstance(refused, EngineRefusal)
            assert (refused.code, refused.retry_after_seconds) == (ErrorCode.NOT_READY, 2.0)
            await check.check(CHEAP)

    asyncio.run(run())


def test_more_than_may_wait_are_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the line that is full: dear ones keep no cheap one away."""
    monkeypatch.setattr(schema_check, "MOST_WAITING", 3)
    monkeypatch.setattr(schema_check, "MOST_DEAR_WAITING", 1)

    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600) as check:
            *_, third, fourth = waiting = [asyncio.create_task(check.check(schema)) for schema in poison(4)]
            await asyncio.gather(fourth, third, return_exceptions=True)
            for sent_away in (third, fourth):
                refused = sent_away.exception()
                assert isinstance(refused, EngineRefusal)
                assert refused.code is ErrorCode.NOT_READY
            await check.check(CHEAP)
            await leave(*waiting)
            await check.check('{"type":"integer","multipleOf":11}')

    asyncio.run(run())


def test_a_child_that_ended_is_made_anew(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600) as check:
            lost = asyncio.create_task(fault_of(check, DEAR))
            await until(lambda: check._dear.num_turns == 1)
            assert check._dear._child is not None
            check._dear._child.kill()
            assert "could not be compiled" in await lost
            again = asyncio.create_task(check.check(DEARER))
            await until(lambda: check._dear.num_turns == 2)
            await leave(again)

    asyncio.run(run())


def test_the_end_of_the_engine_is_told_to_who_waits(tmp_path: Path) -> None:
    async def run() -> None:
        async with checking(tmp_path, cpu_limit_seconds=600) as check:
            waiting = [asyncio.create_task(check.check(schema)) for schema in poison(3)]
            await until(lambda: check._dear.num_turns == 1)
            await check.close()
            for refused in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(refused, EngineRefusal)
                assert refused.code is ErrorCode.NOT_READY

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


def poison(count: int) -> list[str]:
    """So many different schemas, each of which would take many seconds."""
    return [f'{{"type":"integer","multipleOf":{1999993 + 2 * number}}}' for number in range(count)]


async def leave(*waiting: asyncio.Task[Any]) -> None:
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)
