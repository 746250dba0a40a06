"""Which of a pod's Events says why it waits, and which pods are asked after at all."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from stageline_api import labels
from stageline_kubernetes.client import KubeApi, Listing
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.view import pod_poller
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_poller import Pace, PodPoller, Question, trouble_in

KEY = ModelKey("ns", "m")


def event(reason: str, second: int, first: int = 0, **more: Any) -> dict[str, Any]:
    """An Event as a kubelet makes it: in whole seconds, under the names of the older API."""
    times = {
        "deprecatedFirstTimestamp": f"2026-01-01T00:00:{first:02}Z",
        "deprecatedLastTimestamp": f"2026-01-01T00:00:{second:02}Z",
    }
    return {"reason": reason, "note": f"{reason}: words", "eventTime": None, **times} | more


SERIES: dict[str, Any] = {"series": {"lastObservedTime": "2026-01-01T00:00:30.5Z"}, "deprecatedLastTimestamp": None}
CASES: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "nothing was said": ([], None),
    "only the scheduler spoke": ([event("FailedScheduling", 9)], None),
    "the last complaint": ([event("FailedMount", 3), event("FailedCreatePodSandBox", 5)], "FailedCreatePodSandBox"),
    "it mounted in the end": ([event("FailedMount", 9), event("Pulling", 10)], None),
    "within one second": ([event("Pulling", 9), event("FailedMount", 9)], None),
    "an attached volume that won't mount": (
        [event("SuccessfulAttachVolume", 2), event("FailedMount", 9)],
        "FailedMount",
    ),
    "counted in a series": ([event("FailedMount", 1, **SERIES), event("Pulling", 9)], "FailedMount"),
}


@pytest.mark.parametrize(("events", "reason"), CASES.values(), ids=CASES.keys())
def test_the_newest_word_counts(events: list[dict[str, Any]], reason: str | None) -> None:
    found = trouble_in(events)
    assert (found and found.reason) == reason


def test_a_trouble_lasts_since_it_was_said_first() -> None:
    found = trouble_in([event("FailedMount", 9, first=4)])
    assert found is not None
    assert found.since is not None
    assert (found.message, found.since.second) == ("FailedMount: words", 4)


def pod(name: str, version: int = 1, node: str = "n", state: str = "ContainerCreating") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": f"u-{name}", "resourceVersion": str(version)}
    statuses = [{"name": "stage", "state": {"waiting": {"reason": state}} if state else {"running": {}}}]
    status = {"phase": "Pending" if state else "Running", "containerStatuses": statuses}
    return {"metadata": metadata | {"labels": {labels.MODEL: "m"}}, "spec": {"nodeName": node}, "status": status}


class EventsOfPods(KubeApi):
    """Answers lists of Events as an API server would, and remembers whom it was asked after."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refuses = False

    async def list(self, *_where: Any, fields: str = "", **_: Any) -> Listing:
        self.asked.append(fields.removeprefix("regarding.uid=u-"))
        if self.refuses:
            raise ApiError("list events: 403 Forbidden no", 403, "Forbidden")
        return Listing([event("FailedMount", 9)], 1)


class SlowEventsOfPods(EventsOfPods):
    """Answers about one pod only when `answers` is set; notes which questions were given up."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.slow = slow
        self.answers = asyncio.Event()
        self.given_up = 0

    async def list(self, *where: Any, fields: str = "", **how: Any) -> Listing:
        found = await super().list(*where, fields=fields, **how)
        try:
            if self.asked[-1] == self.slow:
                await self.answers.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return found


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_only_pods_that_wait_with_a_node_are_asked_after_and_less_often_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_poller, "_POLL_SECONDS", 0.01)
    monkeypatch.setitem(pod_poller._PACES, Question.EVENTS, Pace(0.05, 0.05, 2.0, 120.0))

    async def scenario() -> None:
        cache, api, told = ObjectCache(), EventsOfPods(), asyncio.Event()
        cache.put("Pod", pod("hangs"))
        cache.put("Pod", pod("unplaced", node=""))
        cache.put("Pod", pod("runs", state=""))
        cache.put("Pod", pod("pulls", state="ErrImagePull"))
        poller = PodPoller(api, cache, lambda key: told.set() if key == KEY else None)
        polling = asyncio.create_task(poller.run())
        async with asyncio.timeout(120):
            await told.wait()
        assert {name: said.reason for name, said in poller.troubles(KEY).items()} == {"hangs": "FailedMount"}
        told.clear()
        await until(lambda: len(api.asked) >= 3)
        assert set(api.asked) == {"hangs"}
        assert not told.is_set(), "the same again is no news"
        api.refuses = True
        count = len(api.asked)
        await until(lambda: len(api.asked) > count)
        assert "hangs" in poller.troubles(KEY), "what can't be asked now is not forgotten"
        cache.put("Pod", pod("hangs", 2, state=""))
        await until(lambda: not poller.troubles(KEY))
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await poller.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["gone", "replaced", "started"])
def test_a_pod_has_one_question_on_its_way_which_ends_with_its_reason(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_poller, "_POLL_SECONDS", 0.01)
    monkeypatch.setitem(pod_poller._PACES, Question.EVENTS, Pace(0.0, 0.0, 1.0, 0.0))

    async def scenario() -> None:
        cache, api = ObjectCache(), SlowEventsOfPods("hangs")
        for name in ("hangs", "other"):
            cache.put("Pod", pod(name))
        poller = PodPoller(api, cache, lambda _: None)
        polling = asyncio.create_task(poller.run())
        await until(lambda: api.asked.count("other") >= 10)
        assert api.asked.count("hangs") == 1, api.asked
        match how:
            case "gone":
                cache.remove("Pod", pod("hangs", 2))
            case "replaced":
                later = pod("hangs", 2)
                later["metadata"]["uid"] = "u-later"
                cache.put("Pod", later)
            case "started":
                cache.put("Pod", pod("hangs", 2, state=""))
        await until(lambda: api.given_up == 1)
        count = api.asked.count("other")
        await until(lambda: api.asked.count("other") > count)
        assert not polling.done()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await poller.close()

    asyncio.run(scenario())


def test_a_pod_is_asked_again_once_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_poller, "_POLL_SECONDS", 0.01)
    monkeypatch.setitem(pod_poller._PACES, Question.EVENTS, Pace(0.0, 0.0, 1.0, 0.0))

    async def scenario() -> None:
        cache, api = ObjectCache(), SlowEventsOfPods("hangs")
        cache.put("Pod", pod("hangs"))
        poller = PodPoller(api, cache, lambda _: None)
        polling = asyncio.create_task(poller.run())
        await until(lambda: api.asked == ["hangs"])
        api.answers.set()
        await until(lambda: len(api.asked) > 2)
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await poller.close()

    asyncio.run(scenario())
