"""A reflector lists once, resumes where a watch ended, and lists again only where it must."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import pytest

from processes.scripted_core_server import until
from stageline_kubernetes import reflector
from stageline_kubernetes.client import KubeApi, Listing
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reflector import WATCH_SECONDS, Reflector
from stageline_operator.controller.client.resources import POD
from stageline_operator.controller.view.object_cache import ObjectCache

Step = Sequence[Sequence[Mapping[str, Any]]] | ApiError


def event(kind: str, version: int, name: str = "a") -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": {"name": name, "resourceVersion": str(version)}}}


class ScriptedApi(KubeApi):
    """Answers watches by a script: batches, or an error after the watch was opened. `done` is set behind the last."""

    def __init__(self, script: Sequence[Step], list_errors: Sequence[ApiError] = (), opens: bool = True) -> None:
        self.script = list(script)
        self.list_errors = list(list_errors)
        self.opens = opens
        """Whether a watch that fails was open."""
        self.lists = 0
        self.watched_from: list[int] = []
        self.done = asyncio.Event()

    async def list(self, *_what: Any, **_how: Any) -> Listing:
        self.lists += 1
        if self.list_errors:
            raise self.list_errors.pop(0)
        return Listing([], 100 * self.lists)

    async def watch(
        self, _resource: Any, _namespace: str, _selector: str, version: int, seconds: int
    ) -> AsyncGenerator[Sequence[dict[str, Any]], None]:
        assert 1 <= seconds <= WATCH_SECONDS
        self.watched_from.append(version)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, ApiError) and not self.opens:
            raise step
        yield []
        if step is None:
            self.done.set()
            await asyncio.Event().wait()
            return
        if isinstance(step, ApiError):
            raise step
        for batch in step:
            yield [dict(each) for each in batch]


class Seen:
    def __init__(self) -> None:
        self.lists: list[int] = []
        self.events: list[str] = []
        self.contacts = 0
        self.failures: list[int] = []

    def listed(self, listing: Listing) -> None:
        self.lists.append(listing.version)

    def heard(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.contacts += 1
        self.events += [each["type"] for each in events]

    def failed(self, error: ApiError) -> None:
        self.failures.append(error.status)


def follow(script: Sequence[Step], relist_seconds: float = 3600.0, **how: Any) -> tuple[ScriptedApi, Seen]:
    async def run() -> tuple[ScriptedApi, Seen]:
        api, seen = ScriptedApi(script, **how), Seen()
        running = asyncio.create_task(Reflector(api, POD, "here", "", seen, relist_seconds).run())
        async with asyncio.timeout(60):
            await api.done.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return api, seen

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_RETRY_SECONDS", "LONGEST_RETRY_SECONDS", "LONGEST_RETRY_AFTER_SECONDS", "SETTLE_SECONDS"):
        monkeypatch.setattr(reflector, name, 0.01)


def test_a_watch_that_ends_is_resumed_from_the_last_version_and_bookmarks_count() -> None:
    api, seen = follow([[[event("ADDED", 103)]], [[event("BOOKMARK", 150)]], []])
    assert (api.lists, api.watched_from) == (1, [100, 103, 150, 150])
    assert (seen.events, seen.failures) == (["ADDED"], [])
    assert seen.contacts >= 6, "each opened watch and each bookmark is a sign of life"


def test_a_connection_that_breaks_is_reported_and_costs_no_list() -> None:
    api, seen = follow([[[event("ADDED", 103)]], ApiError("watch pods: no answer", 0), []])
    assert (api.lists, seen.failures) == (1, [0])
    assert api.watched_from == [100, 103, 103, 103]


def test_an_expired_version_is_listed_again_and_is_no_failure() -> None:
    api, seen = follow([ApiError("watch pods: 410 Expired", 410)])
    assert (api.lists, api.watched_from, seen.failures) == (2, [100, 200], [])


@pytest.mark.parametrize("status", [400, 403, 404, 500, 502])
def test_a_watch_that_would_fail_again_where_it_resumes_is_reported_and_listed_again(status: int) -> None:
    api, seen = follow([ApiError("watch pods", status)] * 3)
    assert (api.lists, seen.failures) == (4, [status] * 3)


@pytest.mark.parametrize("opens", [False, True], ids=["before it is open", "once it is open"])
@pytest.mark.parametrize("status", [0, 429, 503, 504])
def test_a_watch_that_an_overload_ends_is_reported_and_resumed(status: int, opens: bool) -> None:
    api, seen = follow([ApiError("watch pods", status)] * 3, opens=opens)
    assert (api.lists, seen.failures) == (1, [status] * 3)
    assert api.watched_from == [100] * 4


@pytest.mark.parametrize("status", [500, 502])
def test_a_proxy_that_fails_before_a_watch_is_open_costs_no_list(status: int) -> None:
    api, _ = follow([ApiError("watch pods", status)] * 3, opens=False)
    assert api.lists == 1


@pytest.mark.parametrize("seconds", [3600.0, float("inf"), float("nan"), -1.0])
def test_a_server_that_asks_to_wait_for_long_is_asked_again_soon(seconds: float) -> None:
    _, seen = follow([ApiError("watch pods", 429, retry_after_seconds=seconds)])
    assert seen.failures == [429]


def test_watches_that_ran_for_a_while_and_then_broke_are_resumed_as_soon_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector, "LONGEST_RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(reflector, "_SHORT_WATCH_SECONDS", 0.0)
    breaks = [ApiError("watch pods: no answer", 0)] * 30  # of which doubled waits would last for days
    api, seen = follow(breaks)
    assert (len(seen.failures), api.lists) == (30, 1)


def test_lists_that_are_refused_as_expired_are_reported_each_time() -> None:
    _, seen = follow([], list_errors=[ApiError("list pods: 410 Expired", 410)] * 3)
    assert (seen.failures, seen.lists) == ([410] * 3, [400])


def test_everything_is_compared_with_a_list_now_and_then() -> None:
    _, seen = follow([[], [], []], relist_seconds=0.001)
    assert seen.lists == [100, 200, 300, 400]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"type": "ADDED", "object": {}},
        {"type": "MODIFIED", "object": {"metadata": None}},
        {"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "new"}}},
        {"type": "DELETED", "object": {"metadata": {"name": ["x"], "resourceVersion": "104"}}},
    ],
    ids=json.dumps,
)
def test_an_object_that_can_not_be_read_stops_no_other(spoiled: dict[str, Any]) -> None:
    api, seen = follow([[[spoiled, event("ADDED", 103)]]])
    assert seen.events == [spoiled["type"], "ADDED"]
    assert (api.lists, seen.failures) == (1, [])
    cache = ObjectCache()
    take: Mapping[str, Callable[..., bool]] = {"DELETED": cache.remove}
    assert not take.get(spoiled["type"], cache.put)("Pod", spoiled["object"])
    assert cache.put("Pod", event("ADDED", 103)["object"])
    cache.replace("Pod", "", [spoiled["object"], event("ADDED", 104, "b")["object"]], 105)
    assert [identity.name for identity, _ in cache.of_kind("Pod")] == ["b"]


def test_one_that_only_lists_does_so_when_asked() -> None:
    async def run() -> None:
        api, seen = ScriptedApi([]), Seen()
        one = Reflector(api, POD, "here", "", seen, 3600.0, watches=False)
        running = asyncio.create_task(one.run())
        await until(lambda: seen.lists == [100], "it lists")
        one.relist()
        await until(lambda: seen.lists == [100, 200], "it lists again")
        assert api.watched_from == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
