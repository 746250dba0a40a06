"""Who waits for a group is woken by what happens, and by time only where time alone changes something."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from processes.gateway_harness import MODEL, group
from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_api.engine_http import GenerateRequest, TextPrompt
from stageline_gateway.engine_client.run_events import EngineLostError, LossKind
from stageline_gateway.errors import not_ready
from stageline_gateway.groups.backends import Backends, BreakerPolicy, DiscoveredGroups
from stageline_gateway.groups.routing import Wish, identity
from stageline_gateway.relay.placement import Progress, RetryPolicy, Search

WAITERS = 200
AT_ZERO = Endpoints(models=(MODEL,), scaled_to_zero=(MODEL,))


class Served:
    """What is known of a model's groups, and every wait for news of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: BreakerPolicy | None = None) -> None:
        self.waits: list[float] = []
        self.backends = Backends(DiscoveredGroups("a test"), policy=policy or BreakerPolicy())
        self.backends.discovered.on_change = self.backends.take
        changed = Backends.changed

        def noted(backends: Backends, timeout_seconds: float) -> Coroutine[Any, Any, None]:
            self.waits.append(timeout_seconds)
            return changed(backends, timeout_seconds)

        monkeypatch.setattr(Backends, "changed", noted)

    def search(self) -> Search:
        request = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"))
        return Search(self.backends, MODEL, Progress(request), Wish(), RetryPolicy())

    def fail(self, one: GroupEndpoint) -> None:
        with pytest.raises(EngineLostError), self.backends.trial(identity(one)):
            raise EngineLostError(LossKind.UNREACHABLE, "it can't be reached")


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        await asyncio.sleep(0.01)


def test_a_model_at_zero_wakes_no_waiter_before_something_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)

    async def run() -> None:
        served.backends.discovered.accept(AT_ZERO)
        waiting = [asyncio.create_task(served.search().next_group()) for _ in range(WAITERS)]
        await until(lambda: len(served.waits) == WAITERS)
        for _ in range(10):  # what is published again and again is no news
            served.backends.discovered.accept(AT_ZERO.model_copy())
            await asyncio.sleep(0)
        assert len(served.waits) == WAITERS
        assert min(served.waits) > 500, "it looks again before its time is over"
        one = group("http://127.0.0.1:1")
        served.backends.discovered.accept(Endpoints(groups=(one,)))
        async with asyncio.timeout(60):
            assert set(await asyncio.gather(*waiting)) == {one}

    asyncio.run(run())


def test_the_end_of_a_pause_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)

    async def run() -> None:
        one = group("http://127.0.0.1:1")
        served.backends.discovered.accept(Endpoints(groups=(one,)))
        search = served.search()
        search.failed(one, not_ready("gone", 1.0), True)
        async with asyncio.timeout(60):
            assert await search.next_group() == one

    asyncio.run(run())
    assert 1 <= len(served.waits) <= 3, served.waits


def test_the_end_of_a_cool_down_wakes_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, BreakerPolicy(cool_down_seconds=0.3, trial_seconds=600))

    async def run() -> None:
        one = group("http://127.0.0.1:1")
        served.backends.discovered.accept(Endpoints(groups=(one,)))
        served.fail(one)
        async with asyncio.timeout(60):
            assert await served.search().next_group() == one

    asyncio.run(run())
    assert 1 <= len(served.waits) <= 3, served.waits


def test_an_engine_that_answers_its_trial_is_there_for_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, BreakerPolicy(cool_down_seconds=0.01, trial_seconds=600))

    async def run() -> None:
        one = group("http://127.0.0.1:1")
        served.backends.discovered.accept(Endpoints(groups=(one,)))
        served.fail(one)
        async with asyncio.timeout(60):
            assert await served.search().next_group() == one
            with served.backends.trial(identity(one)):
                waiting = [asyncio.create_task(served.search().next_group()) for _ in range(WAITERS)]
                served.waits.clear()
                await until(lambda: len(served.waits) == WAITERS)
                served.backends.answered(identity(one))
                assert set(await asyncio.gather(*waiting)) == {one}

    asyncio.run(run())
