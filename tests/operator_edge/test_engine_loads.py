"""The operator asks engines for their load, over real HTTP; whoever doesn't say it is left out, not taken for idle."""

import asyncio
import secrets
from typing import Any, cast

from aiohttp import web

from stageline_api import labels, ports
from stageline_kubernetes.client import KubeApi
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_poller import PodPoller
from stageline_operator.planner.autoscaling import GroupLoad

KEY = ModelKey("ns", "m")
BUSY = {
    "phase": "Ready",
    "served_name": "m",
    "requests_running": 3,
    "requests_waiting": 2,
    "slots": 4,
    "kv_usage": 0.5,
    "longest_wait_seconds": 7.5,
}


def engine_pod(
    group: int, address: str, incarnation: int = 1, owner_uid: str = "u-m", stage: int = 0
) -> dict[str, Any]:
    name = f"m-{group}-{incarnation}-{stage}-{owner_uid}"
    owner = {"kind": "PipelineModel", "name": "m", "uid": owner_uid, "controller": True}
    own = {labels.MODEL: "m", labels.GROUP: group, labels.INCARNATION: incarnation, labels.STAGE: stage}
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": name,
        "resourceVersion": "1",
        "ownerReferences": [owner],
    }
    metadata["labels"] = {key: str(value) for key, value in own.items()}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": address}}


async def engine_at(address: str, says: Any, asked: list[str]) -> web.AppRunner:
    async def status(_: web.Request) -> web.Response:
        asked.append(address)
        return web.json_response(says)

    app = web.Application()
    app.router.add_get("/status", status)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, ports.ENGINE_STATE).start()
    return runner


def loads_of(pods: list[tuple[dict[str, Any], Any]], incarnations: dict[int, int]) -> tuple[list[GroupLoad], list[str]]:
    """The loads that are found, and the addresses that were asked; an engine that says None is not there."""

    async def ask() -> tuple[list[GroupLoad], list[str]]:
        asked: list[str] = []
        cache = ObjectCache()
        cache.put("PipelineModel", {"metadata": {"name": "m", "namespace": "ns", "uid": "u-m", "resourceVersion": "1"}})
        poller, runners = PodPoller(cast(KubeApi, None), cache, lambda _: None), []
        for pod, says in pods:
            cache.put("Pod", pod)
            if says is not None:
                runners.append(await engine_at(pod["status"]["podIP"], says, asked))
        try:
            return list(await poller.loads(KEY, incarnations)), asked
        finally:
            await poller.close()
            for each in runners:
                await each.cleanup()

    return asyncio.run(ask())


def block() -> str:
    """A block of addresses of its own, so that two runs on one machine don't meet."""
    return f"127.95.{secrets.randbelow(250)}"


def test_an_engine_says_how_many_run_and_wait_and_for_how_long() -> None:
    address = f"{block()}.1"
    found, _ = loads_of([(engine_pod(0, address), BUSY)], {0: 1})
    assert found == [GroupLoad(running=3, waiting=2, slots=4, kv_usage=0.5, longest_wait_seconds=7.5)]


def test_whoever_does_not_say_its_load_is_left_out() -> None:
    """One is gone, one drains, one is of a version that doesn't say its slots, one answers nonsense."""
    own = block()
    no_slots = {key: value for key, value in BUSY.items() if key != "slots"}
    says = [BUSY, None, BUSY | {"phase": "Draining"}, no_slots, ["nonsense"]]
    pods = [(engine_pod(group, f"{own}.{group + 1}"), each) for group, each in enumerate(says)]
    found, asked = loads_of(pods, dict.fromkeys(range(5), 1))
    assert len(found) == 1
    assert len(asked) == 4


def test_only_engines_of_ready_groups_that_the_model_owns_are_asked() -> None:
    own = block()
    pods = [
        (engine_pod(0, f"{own}.1"), BUSY),
        (engine_pod(0, f"{own}.2", incarnation=2), BUSY),  # the next one is not ready yet
        (engine_pod(0, f"{own}.3", owner_uid="u-stranger"), BUSY),
        (engine_pod(0, f"{own}.4", stage=1), BUSY),
        (engine_pod(1, f"{own}.5"), BUSY),  # not ready
    ]
    found, asked = loads_of(pods, {0: 1})
    assert (len(found), asked) == (1, [f"{own}.1"])
