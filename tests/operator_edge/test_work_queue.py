"""The queue of models to reconcile: nothing lost, nothing twice at once, failures wait longer each time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop.work_queue import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, WorkQueue

A, B = ModelKey("ns", "a"), ModelKey("ns", "b")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario

    asyncio.run(bounded())


def test_changes_close_together_make_one_pass() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        for _ in range(5):
            queue.add(A)
        assert await queue.get() == A
        queue.finish(A)
        queue.add_after(B, 0.2)  # due after A would be, if A were queued a second time
        assert await queue.get() == B

    run(scenario())


def test_a_change_during_a_pass_makes_another_one_after_it() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        queue.add_after(A, 0)
        await queue.get()
        queue.add(A)
        queue.add_after(B, 0)
        assert await queue.get() == B, "one model must never be at work twice"
        queue.finish(A)
        assert await queue.get() == A

    run(scenario())


def test_the_sooner_of_two_times_counts() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        queue.add_after(A, 3600)
        queue.add_after(A, 0)
        assert await queue.get() == A
        queue.finish(A, 3600)
        queue.add(A)
        assert await queue.get() == A
        queue.finish(A)

    run(scenario())


def test_failures_wait_longer_each_time_and_a_success_forgets_them() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        waits = []
        for _ in range(12):
            queue.add_after(A, 0)
            await queue.get()
            waits.append(queue.fail(A))
        assert waits[0] <= FIRST_RETRY_SECONDS
        assert LONGEST_RETRY_SECONDS / 2 <= waits[-1] <= LONGEST_RETRY_SECONDS, waits
        queue.add_after(A, 0)
        await queue.get()
        queue.finish(A)
        queue.add_after(A, 0)
        await queue.get()
        assert queue.fail(A) <= FIRST_RETRY_SECONDS

    run(scenario())


def test_a_failure_waits_at_least_as_long_as_the_server_asks_and_changes_do_not_cut_it_short() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        queue.add_after(A, 0)
        await queue.get()
        queue.add(A)
        assert queue.fail(A, retry_after_seconds=45) >= 45
        queue.add_after(B, 0.3)
        assert await queue.get() == B

    run(scenario())


@given(st.lists(st.tuples(st.sampled_from("cwf"), st.integers(0, 3)), max_size=40))
def test_no_change_is_ever_lost(moves: list[tuple[str, int]]) -> None:
    """Whatever happens in whatever order, a model that changed after its last pass began is looked at again."""

    async def scenario() -> None:
        queue = WorkQueue()
        keys = [ModelKey("ns", str(number)) for number in range(4)]
        dirty: set[ModelKey] = set()
        at_work: list[ModelKey] = []
        for move, number in moves:
            match move:
                case "c":
                    queue.add_after(keys[number], 0)
                    dirty.add(keys[number])
                    await asyncio.sleep(0)
                case "w" if len(queue):
                    key = await queue.get()
                    assert key not in at_work
                    at_work.append(key)
                    dirty.discard(key)
                case "f" if at_work:
                    queue.finish(at_work.pop(0))
        for key in at_work:
            queue.finish(key)
        seen: set[ModelKey] = set()
        async with asyncio.timeout(60):
            while dirty - seen:
                key = await queue.get()
                seen.add(key)
                queue.finish(key)

    run(scenario())
