"""The operator asks stages which layers they hold: over real HTTP, until they say so, and never again."""

import asyncio
import secrets
import zlib
from typing import Any, cast

import pytest
from aiohttp import web

from stageline_api import labels, ports
from stageline_kubernetes.client import KubeApi, Listing
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.view import pod_poller
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_poller import Pace, PodPoller, Question

KEY = ModelKey("ns", "m")
LOADING = {"phase": "Loading", "stage": 0, "stage_count": 2, "incarnation": 1}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in giving up: on a busy machine a question may take long, and must not be asked a second time for that."""
    monkeypatch.setattr(pod_poller, "_POLL_SECONDS", 0.01)
    monkeypatch.setitem(pod_poller._PACES, Question.LAYERS, Pace(0.0, 0.01, 1.3, 60.0))
    monkeypatch.setattr(pod_poller, "_TIMEOUT_SECONDS", 90.0)


def cache_with_model() -> ObjectCache:
    cache = ObjectCache()
    cache.put("PipelineModel", {"metadata": {"name": "m", "namespace": "ns", "uid": "u-m", "resourceVersion": "1"}})
    return cache


def pod(uid: str, version: int, address: str, name: str = "m-0-1-0", owner_uid: str = "u-m") -> dict[str, Any]:
    owner = {"kind": "PipelineModel", "name": "m", "uid": owner_uid, "controller": True}
    metadata: dict[str, Any] = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    metadata |= {"ownerReferences": [owner]} if owner_uid else {}
    status = {"phase": "Running", "podIP": address}
    return {"metadata": metadata | {"labels": {labels.MODEL: "m"}}, "spec": {}, "status": status}


async def stop(poller: PodPoller, polling: "asyncio.Task[None]") -> None:
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    await poller.close()


async def stage_at(address: str, asked: list[str]) -> web.AppRunner:
    """A stage that loads while it is asked twice, then says its layers."""

    async def status(_: web.Request) -> web.Response:
        asked.append("status")
        loaded = {"layers": {"first": 0, "last": 14}} if len(asked) > 2 else {}
        return web.json_response(LOADING | loaded)

    app = web.Application()
    app.router.add_get("/status", status)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, ports.STAGE_HEALTH).start()
    return runner


@pytest.mark.usefixtures("quick")
def test_a_stage_is_asked_until_it_knows_and_a_pod_that_never_answers_holds_nobody_up() -> None:
    async def scenario() -> None:
        asked: list[str] = []
        # A block of its own, so that two runs on one machine don't meet.
        block = f"127.93.{secrets.randbelow(250)}"
        address, silent = f"{block}.1", f"{block}.2"
        told = asyncio.Event()
        cache = cache_with_model()
        cache.put("Pod", pod("u1", 1, address))
        cache.put("Pod", pod("u2", 1, silent, "silent"))
        poller = PodPoller(cast(KubeApi, None), cache, lambda key: told.set() if key == KEY else None)
        runner = await stage_at(address, asked)
        polling = asyncio.create_task(poller.run())
        async with asyncio.timeout(120):
            await told.wait()
        assert poller.layers(KEY) == {"m-0-1-0": "0-14"}
        answers = len(asked)
        await asyncio.sleep(0.1)
        assert len(asked) == answers == 3, "a stage that said it is left alone"
        cache.remove("Pod", pod("u1", 2, address))
        assert poller.layers(KEY) == {}
        await stop(poller, polling)
        await runner.cleanup()

    asyncio.run(scenario())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("owner_uid", ["", "u-before"])
def test_a_pod_that_anybody_labelled_is_not_asked(owner_uid: str) -> None:
    async def scenario() -> None:
        asked: list[str] = []
        block = f"127.94.{secrets.randbelow(250)}"
        cache = cache_with_model()
        cache.put("Pod", pod("u1", 1, f"{block}.1", "stranger", owner_uid))
        cache.put("Pod", pod("u2", 1, f"{block}.2"))
        told = asyncio.Event()
        poller = PodPoller(cast(KubeApi, None), cache, lambda _: told.set())
        runners = [await stage_at(f"{block}.1", asked), await stage_at(f"{block}.2", ["", ""])]
        polling = asyncio.create_task(poller.run())
        async with asyncio.timeout(120):
            await told.wait()
        assert asked == []
        await stop(poller, polling)
        for each in runners:
            await each.cleanup()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["endless", "slow", "compressed"])
def test_an_answer_is_bounded_in_bytes_and_in_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pod answers costs the operator no memory and holds nobody up."""
    monkeypatch.setattr(pod_poller, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(pod_poller, "_TIMEOUT_SECONDS", 5.0)
    sent = 0
    ended = asyncio.Event()
    piece = b" " if kind == "slow" else b" " * 65536
    if kind == "compressed":
        piece = zlib.compress(b" " * 2**24, wbits=31)

    async def status(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(headers={"Content-Encoding": "gzip"} if kind == "compressed" else {})
        await answer.prepare(request)
        try:
            while True:
                await answer.write(piece)
                sent += len(piece)
                await asyncio.sleep(0.05 if kind == "slow" else 0)
        finally:
            ended.set()

    async def scenario() -> None:
        address = f"127.95.{secrets.randbelow(250)}.1"
        app = web.Application()
        app.router.add_get("/status", status)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, address, ports.STAGE_HEALTH).start()
        cache = cache_with_model()
        cache.put("Pod", pod("u1", 1, address))
        poller = PodPoller(cast(KubeApi, None), cache, lambda _: None)
        polling = asyncio.create_task(poller.run())
        async with asyncio.timeout(90):
            await ended.wait()
        assert not polling.done()
        assert poller.layers(KEY) == {}
        assert sent < 2**25, f"{sent} bytes were taken before it was enough"
        await stop(poller, polling)
        await runner.cleanup()

    asyncio.run(scenario())


@pytest.mark.usefixtures("quick")
def test_a_stage_whose_containers_came_late_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its Events were waited for: another question has waits of its own."""
    monkeypatch.setitem(pod_poller._PACES, Question.EVENTS, Pace(0.0, 3600.0, 1.0, 3600.0))
    looked_up = asyncio.Event()

    class Events(KubeApi):
        def __init__(self) -> None:
            pass

        async def list(self, *_where: Any, **_how: Any) -> Listing:
            looked_up.set()
            return Listing([], 1)

    async def scenario() -> None:
        address, told = f"127.94.{secrets.randbelow(250)}.9", asyncio.Event()
        cache = cache_with_model()
        late = pod("u1", 1, address)
        late |= {"spec": {"nodeName": "n"}, "status": {"phase": "Pending", "podIP": address}}
        cache.put("Pod", late)
        poller = PodPoller(Events(), cache, lambda _: told.set())
        runner, polling = await stage_at(address, ["", ""]), asyncio.create_task(poller.run())
        async with asyncio.timeout(120):
            await looked_up.wait()
            cache.put("Pod", pod("u1", 2, address))
            await told.wait()
        assert poller.layers(KEY) == {"m-0-1-0": "0-14"}
        await stop(poller, polling)
        await runner.cleanup()

    asyncio.run(scenario())
